"""A scenario in the making: every field with its source, and an account of what became of the file's fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sim.interop.given import UNKNOWN, Given, Raw, WrongValue, given
from sim.interop.options import Options
from sim.interop.table import Table
from sim.scenario import Scenario, is_field
from sim.scenario.document import MISSING, Document, Origin, merged
from sim.scenario.problems import Problem, ScenarioError
from sim.scenario.resolve import resolve


class ImportProblems(ScenarioError):
    """A file that no scenario can be made of; everything found, printed as for scenarios."""

    ending: ClassVar[str] = "Nothing was imported."


@dataclass(frozen=True, slots=True)
class Entry:
    """A field in the account: its name as the tool writes it, its line, and what became of it."""

    name: str
    line: int | None
    text: str


@dataclass(slots=True)
class Account:
    """Fields by what became of them. `assumed` are the scenario's own fields that the file does not say."""

    used: list[Entry] = field(default_factory=list)
    assumed: list[Entry] = field(default_factory=list)
    ignored: list[Entry] = field(default_factory=list)
    not_expressible: list[Entry] = field(default_factory=list)
    unknown: list[Entry] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Everything with an effect on time or memory is in the scenario."""
        return not (self.not_expressible or self.unknown)


@dataclass(frozen=True, slots=True)
class Imported:
    """`document`: the scenario's sections; `comments` by path: where a value comes from; `scenario`: resolved."""

    tool: str
    file: str
    document: dict[str, Any]
    comments: dict[tuple[str, ...], str]
    account: Account
    scenario: Scenario


class Draft:
    """Collects sections, sources and problems; `finish` checks the whole."""

    def __init__(self, file: Path, table: Table, options: Options, raws: Iterable[Raw]) -> None:
        self.file, self.table, self.options = str(file), table, options
        self.account = Account()
        self.problems: list[Problem] = []
        self.comments: dict[tuple[str, ...], str] = {}
        self.document = Document({}, {(): Origin(self.file, None, ())})
        self.overrides = options.document(self.file)
        self.given: dict[str, Given] = {}
        self.told: set[str] = set()
        self.wrong: set[str] = set()
        self.trials: dict[str, tuple[tuple[str, ...], Given]] = {}
        for raw in raws:
            self._take(raw)

    def _take(self, raw: Raw) -> None:
        """Sort one name into the account; the last of several counts, as argparse has it."""
        known = self.table.find(raw.name)
        if known is None:
            nearest = self.table.nearest(raw.name)
            hint = f"did you mean {self.table.written(nearest)}?" if nearest else f"{self.table.tool} has no such field"
            self.account.unknown.append(Entry(self.table.written(raw.name), raw.line, hint))
            return
        try:
            value = given(known, raw)
        except WrongValue as error:
            if known.kind == "ignored":
                self.ignore(raw.name, raw.line, "")
                return
            name = self.table.written(raw.name)
            self.wrong.add(known.name)
            message = f"{raw.value}: {error}" if raw.value is not None else str(error)
            self.problems.append(Problem(file=self.file, line=raw.line, path=name, message=message))
            return
        if known.kind == "ignored":
            self.ignore(known.name, raw.line, known.says)
        elif known.takes == "flag" and value.value is False:
            self.given.pop(known.name, None)
        else:
            self.given[known.name] = value

    # what the file says

    def has(self, name: str) -> bool:
        """Is the field given (a flag: set)?"""
        return name in self.given

    def get(self, name: str) -> Any:
        """The value of a field, or the tool's default. Unknown to everything but a running script: a problem, and None."""
        value = self.given.get(name)
        if value is None:
            return self.table.fields[name].default
        if value.value is UNKNOWN:
            self.problem(
                name, f"{value.text} is only known when the script runs: give --var, or an option that says it"
            )
            return None
        return value.value

    def override(self, path: str) -> Any:
        """What an option says for a field of the scenario, or None."""
        value = self.overrides.value(tuple(path.split(".")))
        return None if value is MISSING else value

    # what the scenario says

    def put(self, path: str, value: Any, *names: str, note: str = "") -> None:
        """Write a field of the scenario. `names`: the tool's fields that it comes from, given or by default."""
        parts = tuple(path.split("."))
        self._write(parts, value, names)
        sources = [self._source(parts, value, name) for name in names]
        self.comments[parts] = "; ".join([*(source for source in sources if source), *([note] if note else [])])
        if not names:
            self.account.assumed.append(Entry(path, None, f"{_shown(value)}: {note}"))

    def _write(self, parts: tuple[str, ...], value: Any, names: Sequence[str]) -> None:
        place = self.document.data
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
        first = next((self.given[name] for name in names if name in self.given), None)
        shown_path = (self.table.written(first.field.name),) if first else parts
        origin = Origin(self.file, first.line if first else None, shown_path)
        for length in range(2, len(parts) + 1):
            self.document.origins.setdefault(parts[:length], origin)
        self.document.origins[parts] = origin
        self.document.origins.setdefault(parts[:1], Origin(self.file, None, parts[:1]))

    def _source(self, parts: tuple[str, ...], value: Any, name: str) -> str:
        path, written = ".".join(parts), self.table.written(name)
        text = _shown(value)
        if name in self.given:
            source = self.given[name]
            self.told.add(name)
            self.account.used.append(Entry(written, source.line, f"{path}: {text}"))
            return f"{written} {source.text}".strip()
        default = self.table.fields[name].default
        said = f"without {written}" if default is None else f"{written} {default} by default"
        self.account.assumed.append(Entry(path, None, f"{text}: {said}"))
        return said

    def use(self, name: str, text: str) -> None:
        """A given field was understood without a field of the scenario of its own."""
        if name in self.given and name not in self.told:
            self.account.used.append(Entry(self.table.written(name), self.given[name].line, text))
        self.told.add(name)

    def ignore(self, name: str, line: int | None, text: str) -> None:
        self.account.ignored.append(Entry(self.table.written(name), line, text))
        self.told.add(name)

    def cannot(self, name: str, reason: str) -> None:
        """A field with an effect that the scenario does not say."""
        source, field = self.given.get(name), self.table.fields[name]
        written = self.table.written(name)
        if source is not None:
            said = f"{written} {source.text}".strip()
        else:
            said = f"without {written}" if field.default is None else f"{written} {field.default} (default)"
        self.account.not_expressible.append(Entry(said, source.line if source else None, reason))
        self.told.add(name)

    def assume(self, what: str, text: str) -> None:
        """Something that is taken to hold and has no field of the scenario."""
        self.account.assumed.append(Entry(what, None, text))

    def undecided(self, line: int) -> None:
        """A condition, loop or case of a script that cannot be followed without running it."""
        self.account.assumed.append(Entry("script", line, "a condition or loop that is not followed: taken as false"))

    def problem(self, name: str, message: str) -> None:
        """Something that must be put right: at a field of the file, or (with dashes) an option. What is wrong with the
        value itself is told already."""
        if name in self.wrong:
            return
        source = self.given.get(name)
        path = self.table.written(name) if name in self.table.fields else name
        self.problems.append(Problem(file=self.file, line=source.line if source else None, path=path, message=message))

    def direct(self) -> None:
        """Fields of the table that are a field of the scenario, and those with an effect that one may say."""
        for name, source in self.given.items():
            line = source.field
            if line.kind == "effect":
                self._effect(name, source)
            elif line.to is not None and name not in self.told and (value := self.get(name)) is not None:
                self.put(line.to, value, name)

    def _effect(self, name: str, source: Given) -> None:
        line = source.field
        if name in self.told:
            return
        value = list(source.value) if isinstance(source.value, tuple) else source.value
        if value == line.default or value in line.off:
            self.use(name, "says what holds without it")
        elif line.to is not None and is_field(line.to) and (line.values is None or source.value in line.values):
            if (value := self.get(name)) is not None:
                self.trials[self.table.written(name)] = (tuple(line.to.split(".")), source)
                self._write(tuple(line.to.split(".")), line.values[value] if line.values else value, [name])
                self.told.add(name)
        else:
            missing = f" (scenarios have no {line.to})" if line.to and not is_field(line.to) else ""
            self.cannot(name, line.says + missing)

    # the whole

    def finish(self, name: str) -> Imported:
        """The checked scenario. Raises ImportProblems with everything that is wrong."""
        for key, source in self.given.items():
            if key not in self.told:
                self.ignore(key, source.line, "has no effect here")
        if self.problems:
            raise ImportProblems([*self.problems, *self.overrides.problems])
        scenario = self._resolved(name)
        for written, (parts, source) in self.trials.items():
            self.account.used.append(Entry(written, source.line, ".".join(parts)))
            self.comments[parts] = f"{written} {source.text}".strip()
        data = merged(self.document, self.overrides).data
        for path in self.options.said():
            self.comments[path[0]] = path[1]
        for entries in (self.account.used, self.account.ignored, self.account.not_expressible, self.account.unknown):
            entries.sort(key=_place)
        return Imported(self.table.tool, self.file, data, self.comments, self.account, scenario)

    def _resolved(self, name: str) -> Scenario:
        """Resolve; what a field on trial cannot say beside the others is taken out again."""
        while True:
            document = merged(self.document, self.overrides)
            try:
                return resolve(document, name, None)
            except ScenarioError as error:
                if not self.trials:
                    raise ImportProblems(error.problems) from None
                blamed = next((problem for problem in error.problems if problem.path in self.trials), error.problems[0])
                written = blamed.path if blamed.path in self.trials else next(reversed(self.trials))
                parts, source = self.trials.pop(written)
                self._remove(parts)
                self.cannot(source.field.name, f"{source.field.says} ({blamed.text})")

    def _remove(self, parts: tuple[str, ...]) -> None:
        for length in range(len(parts), 0, -1):
            place = self.document.value(parts[: length - 1])
            if length == len(parts) or place[parts[length - 1]] == {}:
                place.pop(parts[length - 1], None)
                self.document.origins.pop(parts[:length], None)


def _place(entry: Entry) -> tuple[int, str]:
    return entry.line or 0, entry.name


def _shown(value: Any) -> str:
    """A value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)
