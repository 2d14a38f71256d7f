"""Tables of the fields that other tools' configurations know: `*.yaml` beside this file, one per tool.

A table has three parts, and a new field is one line in one of them:

- `used`: becomes a part of the scenario, at `to`, or by the tool's own module;
- `ignored`: known, and without effect on the time or the memory of a step;
- `effect`: known, with an effect. `to` names the field of a scenario that says the same. The schema is asked for it at
  run time: until a scenario has the field, what the file says is "not expressible".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ruamel.yaml import YAML

from sim.scenario.problems import nearest_name

Kind = Literal["used", "ignored", "effect"]
TAKES = ("int", "float", "flag", "text", "list", "bool", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a tool's configuration.

    `takes`: what it is given: int, float, text, bool; flag: nothing (it is there or not); list: any number of words.
    `default`: what the tool does without it. `off`: further values without effect (the default and, for flags, absence
    always are). `dest`: the name under which files of settings say the opposite of a flag ("add-bias-linear" for
    "disable-bias-linear"). `also`: other spellings. `says`: what the effect is, or why there is none.
    """

    name: str
    kind: Kind
    takes: str = "text"
    to: str | None = None
    default: Any = None
    off: tuple[Any, ...] = ()
    values: Mapping[Any, Any] | None = None
    dest: str | None = None
    also: tuple[str, ...] = ()
    says: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """The fields of one tool. `tool`: its name for people; `dashes`: how its fields are written ("--" or nothing)."""

    tool: str
    version: str
    dashes: str
    fields: Mapping[str, Field]
    spellings: Mapping[str, Field]
    """Fields by any of their names."""
    facts: Mapping[str, Any]
    """Further facts of the tool, by name."""

    def find(self, name: str) -> Field | None:
        """The field of that name, in any of its spellings."""
        return self.spellings.get(name)

    def nearest(self, name: str) -> str | None:
        """The field that was probably meant."""
        return nearest_name(name, self.fields)

    def written(self, name: str) -> str:
        """A field as the tool's users write it: "--num-layers"."""
        return self.dashes + name


@cache
def load_table(name: str) -> Table:
    """The table of a tool: megatron, deepspeed, accelerate, torchtitan, huggingface."""
    text = files("sim.interop").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    data = YAML(typ="safe", pure=True).load(text)
    fields: dict[str, Field] = {}
    for kind in ("used", "ignored", "effect"):
        for key, line in (data.get(kind) or {}).items():
            assert key not in fields, f"{name}.yaml: {key} is given twice"
            fields[key] = _field(key, kind, line)
    spellings = {other: field for field in fields.values() for other in field.also} | fields
    return Table(data["tool"], data["version"], data.get("dashes", ""), fields, spellings, data.get("facts") or {})


def _field(name: str, kind: Kind, line: Any) -> Field:
    """A line: a mapping, or for short only what the field takes."""
    values = {"takes": line} if isinstance(line, str) else dict(line or {})
    for key in ("off", "also"):
        if key in values:
            values[key] = tuple(values[key] if isinstance(values[key], list) else [values[key]])
    field = Field(name=name, kind=kind, **values)
    assert field.takes in TAKES, field
    return field
