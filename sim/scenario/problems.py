"""Everything wrong with a scenario, shown together: file, line, path, value, what is allowed, nearest name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

SHOWN_VALUE_LENGTH = 40
LISTED_NAMES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to put right. `line` counts from 1; `path` is dotted as in --set; `value` is shown as written."""

    file: str
    message: str
    line: int | None = None
    path: str = ""
    value: str | None = None
    allowed: tuple[str, ...] = ()
    nearest: str | None = None

    @property
    def text(self) -> str:
        """Value, what is expected instead, and a guess: "torchtian: one of ... (did you mean torchtitan?)"."""
        words = [f"{self.value}:"] if self.value is not None else []
        words += [self.message] if self.message else []
        words += [_listed(self.allowed, self.value)] if self.allowed else []
        words += [f"(did you mean {self.nearest}?)"] if self.nearest else []
        return " ".join(words)

    @property
    def place(self) -> str:
        """ "line 4", or nothing where a line makes no sense (a missing file, --set)."""
        return "" if self.line is None else f"line {self.line}"


class ScenarioError(Exception):
    """A scenario that cannot be run. `problems` holds everything found; str() prints it for people."""

    ending: ClassVar[str] = "Nothing was run."

    def __init__(self, problems: Iterable[Problem]) -> None:
        unique = dict.fromkeys(problems)
        self.problems = tuple(sorted(unique, key=lambda problem: (problem.file, problem.line or 0)))
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = []
        for file, problems in groupby(self.problems, key=lambda problem: problem.file):
            lines += [file, *_table(list(problems))]
        count = len(self.problems)
        return "\n".join([*lines, f"{count} problem{'s' * (count != 1)}. {self.ending}"])


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if one is close; case does not matter."""
    by_lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def shown(value: Any) -> str:
    """A YAML value in one short line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = " ".join(text.split()) or '""'
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[: SHOWN_VALUE_LENGTH - 3] + "..."


def dotted(path: Sequence[str | int]) -> str:
    """("checkpoint", "save", 0) -> "checkpoint.save[0]"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _listed(names: tuple[str, ...], value: str | None) -> str:
    if len(names) <= LISTED_NAMES:
        return f"one of {', '.join(names)}"
    some = difflib.get_close_matches(value or "", names, n=5, cutoff=0.0)
    return f"one of {len(names)} names such as {', '.join(some)}"


def _table(problems: list[Problem]) -> list[str]:
    """Rows of place, path and text, aligned."""
    place_width = max(len(problem.place) for problem in problems)
    path_width = max(len(problem.path) for problem in problems)
    rows = []
    for problem in problems:
        place = problem.place.ljust(place_width) + "  " if place_width else ""
        path = problem.path.ljust(path_width) + "  " if path_width else ""
        rows.append(f"  {place}{path}{problem.text}".rstrip())
    return rows
