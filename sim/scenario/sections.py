"""Valid sections of a document: each is checked against the schema on its own, so that one wrong section hides none."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from sim.scenario.document import MISSING, Document, Path, merged
from sim.scenario.schema import STRATEGY_FIELDS, ScenarioFile, StrategySection

EXPECTED = {
    "bool_type": "true or false is expected",
    "string_type": "text is expected",
    "list_type": "a list is expected, e.g. [...]",
    "tuple_type": "a list is expected, e.g. [...]",
    "int_type": "a whole number is expected",
    "float_type": "a number is expected",
    "dict_type": "a section is expected, e.g. {name: value}",
    "model_type": "a section is expected, e.g. {name: value}",
    "missing": "is missing",
}


def strategies_of(document: Document) -> list[tuple[str, Document]]:
    """Every strategy's name and its complete document: the scenario with the strategy's sections merged into it.

    Problems of the strategies' own shape (unknown sections, no section at all) are noted on `document`.
    """
    base = Document({key: value for key, value in document.data.items() if key != "strategies"}, document.origins)
    strategies = document.value(("strategies",))
    if strategies is MISSING or strategies is None:
        return [("default", base)]
    if not isinstance(strategies, dict) or not strategies:
        document.problem(("strategies",), "at least one strategy is expected, e.g. {full: {checkpoint: {every: 1}}}")
        return [("default", base)]
    complete = []
    for name, changes in strategies.items():
        path: Path = ("strategies", name)
        if not isinstance(changes, dict | None):
            document.problem(path, "the sections that it changes are expected, e.g. {checkpoint: {every: 2}}")
            continue
        for key in changes or {}:
            if key not in STRATEGY_FIELDS:
                _unknown(document, (*path, key), StrategySection, "cannot be set per strategy:")
        complete.append((name, _changed(base, document.below(path))))
    return complete


def _changed(base: Document, changes: Document) -> Document:
    known = {key: value for key, value in changes.data.items() if key in STRATEGY_FIELDS}
    changes.origins.pop((), None)
    return merged(base, Document(known, changes.origins))


@dataclass(frozen=True, slots=True)
class Sections:
    """Validated sections by name. `patched`: those read without their wrong fields, good for further checks only."""

    by_name: dict[str, Any]
    patched: frozenset[str]

    def get(self, name: str) -> Any:
        """The section, or None where it is absent, null or wrong."""
        return self.by_name.get(name)

    def whole(self, *names: str) -> bool:
        """All named sections are just as the user wrote them."""
        return all(name in self.by_name and name not in self.patched for name in names)


def valid_sections(document: Document) -> Sections:
    """The sections that are well formed, defaults filled in; what is wrong is noted on `document`.

    A section that stays wrong without its wrong fields, or is missing where it is required, is left out.
    """
    sections: dict[str, Any] = {}
    patched: set[str] = set()
    for key in document.data:
        if key not in ScenarioFile.model_fields:
            _unknown(document, (key,), ScenarioFile, "no such section:")
    for name, field in ScenarioFile.model_fields.items():
        if name == "strategies":
            continue
        value = document.value((name,))
        if value is MISSING:
            if field.is_required():
                document.problem((name,), EXPECTED["missing"])
            else:
                sections[name] = field.get_default(call_default_factory=True)
            continue
        try:
            sections[name] = _adapter(name).validate_python(value)
        except ValidationError as error:
            patched.add(name)
            details = error.errors(include_url=False)
            for detail in details:
                _note(document, (name, *detail["loc"]), detail)
            with suppress(ValidationError):
                sections[name] = _adapter(name).validate_python(_without(value, [detail["loc"] for detail in details]))
    return Sections(sections, frozenset(patched))


def _without(value: Any, paths: list[Path]) -> Any:
    """A copy of `value` without the fields and entries at `paths`."""
    if isinstance(value, dict):
        return {
            key: _without(entry, [path[1:] for path in paths if path[:1] == (key,)])
            for key, entry in value.items()
            if (key,) not in paths
        }
    if isinstance(value, list):
        return [entry for index, entry in enumerate(value) if (index,) not in paths]
    return value


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    field = ScenarioFile.model_fields[name]
    kind: Any = field.annotation
    return TypeAdapter(Annotated[kind, *field.metadata] if field.metadata else kind)


def _note(document: Document, path: Path, detail: ErrorDetails) -> None:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        _unknown(document, path, _section_at(path[:-1]), "no such setting:")
    elif kind == "literal_error":
        names = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        document.problem(path, "", allowed=tuple(name or number for name, number in names))
    elif kind == "value_error":
        document.problem(path, str(context["error"]))
    else:
        document.problem(path, EXPECTED.get(kind, detail["msg"]))


def _unknown(document: Document, path: Path, section: type[BaseModel], message: str) -> None:
    """A field that the section lacks; shown without its value, since its name is what is wrong."""
    document.unknown(path, message, tuple(section.model_fields))


def _section_at(path: Path) -> type[BaseModel]:
    """The schema of the section at a path that is known to lead to one."""
    section: type[BaseModel] = ScenarioFile
    for part in (part for part in path if isinstance(part, str)):
        section = model_in(section.model_fields[part].annotation) or section
    return section


def is_field(path: str) -> bool:
    """Does a scenario have the field at a dotted path?"""
    section: type[BaseModel] | None = ScenarioFile
    for part in path.split("."):
        if section is None or part not in section.model_fields:
            return False
        section = model_in(section.model_fields[part].annotation)
    return True


def model_in(kind: Any) -> type[BaseModel] | None:
    """The pydantic model in `Model`, `Model | None` or a tuple of these."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return next((model for option in get_args(kind) if (model := model_in(option))), None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
