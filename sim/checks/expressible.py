"""What the schema of scenarios can say, asked at run time."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from sim.scenario.schema import ScenarioFile


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
