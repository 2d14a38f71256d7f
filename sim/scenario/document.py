"""A document: plain values with the place where each was written, so that sections can be merged and still blamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sim.scenario.problems import Problem, dotted, nearest_name, shown

Path = tuple[str | int, ...]

MISSING = object()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: file (or "--set"), line counted from 1, and its path there."""

    file: str
    line: int | None
    path: Path


@dataclass(slots=True)
class Document:
    """`data` as plain dicts, lists and scalars; `origins` by path, the root's under ()."""

    data: dict[str, Any]
    origins: dict[Path, Origin]
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def value(self, path: Path) -> Any:
        """The value at a path, or MISSING."""
        value: Any = self.data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return MISSING
        return value

    def origin(self, path: Path) -> Origin:
        """Where `path` was written, or the nearest enclosing section where it is missing."""
        for length in range(len(path), -1, -1):
            known = self.origins.get(path[:length])
            if known is not None:
                return Origin(known.file, known.line, known.path + path[length:])
        raise KeyError(path)

    def problem(self, path: Path, message: str, *, show: bool = True, allowed: tuple[str, ...] = ()) -> None:
        """Note that the value at `path` cannot be. `show`: begin with the value, where there is one."""
        self.problems.append(self._blame(path, message, show, allowed))

    def unknown(self, path: Path, message: str, known: tuple[str, ...]) -> None:
        """Note that nothing is called as the last part of `path` is; `known` are the names that would do."""
        origin = self.origin(path)
        where = dotted(origin.path)
        nearest = nearest_name(str(path[-1]), known)
        self.problems.append(
            Problem(file=origin.file, line=origin.line, path=where, message=message, allowed=known, nearest=nearest)
        )

    def warning(self, path: Path, message: str) -> None:
        """Note that the value at `path` is probably not what is wanted; it is used all the same."""
        self.warnings.append(self._blame(path, message, True, ()))

    def _blame(self, path: Path, message: str, show: bool, allowed: tuple[str, ...]) -> Problem:
        origin, value = self.origin(path), self.value(path)
        return Problem(
            file=origin.file,
            line=origin.line,
            path=dotted(origin.path),
            value=None if value is MISSING or not show else shown(value),
            message=message,
            allowed=allowed,
            nearest=nearest_name(value, allowed) if isinstance(value, str) else None,
        )

    def below(self, path: Path) -> Document:
        """The section at `path` as a document of its own; its values still know where they were written."""
        data = self.value(path)
        cut = len(path)
        origins = {place[cut:]: origin for place, origin in self.origins.items() if place[:cut] == path}
        return Document(data if isinstance(data, dict) else {}, origins or {(): self.origin(path)})


def merged(base: Document, top: Document) -> Document:
    """`top` over `base`: sections merge key by key, everything else (lists, null, values) is replaced."""
    origins = dict(base.origins)
    data = _merge(base.data, top.data, (), origins, top.origins)
    return Document(data, origins, base.problems + top.problems, base.warnings + top.warnings)


def _merge(
    base: Mapping[str, Any], top: Mapping[str, Any], path: Path, origins: dict[Path, Origin], new: dict[Path, Origin]
) -> dict[str, Any]:
    data = dict(base)
    for key, value in top.items():
        place = (*path, key)
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            origins[place] = new[place]
            data[key] = _merge(data[key], value, place, origins, new)
            continue
        for old in [old for old in origins if old[: len(place)] == place]:
            del origins[old]
        origins.update({known: origin for known, origin in new.items() if known[: len(place)] == place})
        data[key] = value
    return data
