"""What a run may use, and whether the schema of scenarios can say it, asked at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from sim.checks.facts import Facts
from sim.scenario.schema import ScenarioFile


class NotExpressible(Exception):
    """A row that a scenario cannot say; the message has every reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """`needed`: does the row use it? `path`: the field that expresses it; `value`: what to write there."""

    name: str
    path: str
    needed: Callable[[Facts], bool]
    value: Callable[[Facts], Any] = lambda _: None
    without: str = ""
    """What is assumed where the schema lacks the field; without such words the row is not expressible then."""


def expressible(path: str) -> bool:
    """Does the schema of scenarios have a field at this dotted path?"""
    section: type[BaseModel] | None = ScenarioFile
    for name in path.split("."):
        fields: Mapping[str, Any] = section.model_fields if section else {}
        if name not in fields:
            return False
        section = _section(fields[name].annotation)
    return True


def _section(kind: Any) -> type[BaseModel] | None:
    if get_origin(kind) in (Union, UnionType):
        return next((found for option in get_args(kind) if (found := _section(option))), None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
