"""What a file gives: names and values as written, found in the tool's table and brought to their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.interop.shell import as_written, is_unknown
from sim.interop.table import Field
from sim.scenario.problems import shown

UNKNOWN = object()
"""A value that only a running script knows."""

WORDS = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


class WrongValue(ValueError):
    """A value of another type than the tool takes; the message says what is expected."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A name and its value as written (text, or a plain value of JSON, YAML or TOML); the line counts from 1."""

    name: str
    value: Any
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """A field with its value; `text`: the value for people."""

    field: Field
    value: Any
    line: int | None
    text: str


def given(field: Field, raw: Raw) -> Given:
    """The value in the field's type, UNKNOWN where only a running script knows it. Raises WrongValue."""
    text = as_written(" ".join(map(str, raw.value)) if isinstance(raw.value, list | tuple) else shown(raw.value))
    if any(isinstance(word, str) and is_unknown(word) for word in _words(raw.value)):
        return Given(field, UNKNOWN, raw.line, text)
    return Given(field, _converted(field.takes, raw.value), raw.line, "" if raw.value is None else text)


def _words(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _converted(takes: str, value: Any) -> Any:
    if takes in ("flag", "bool"):
        return _truth(value)
    if takes == "list":
        return tuple(_words(value)) if value is not None else ()
    if takes == "any":
        return value
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if takes == "int":
        return _number(value, "a whole number", int)
    if takes == "float":
        return _number(value, "a number", float)
    if value is None:
        raise WrongValue("a value is expected")
    return value if isinstance(value, bool) else str(value)


def _truth(value: Any) -> bool:
    """A flag stands alone on a command line (None); files of settings say true or false."""
    if value is None or isinstance(value, bool):
        return value is not False
    if str(value).lower() in WORDS:
        return WORDS[str(value).lower()]
    raise WrongValue("true or false is expected")


def _number(value: Any, what: str, kind: type[int] | type[float]) -> int | float:
    """Underscores are fine ("50_257"), text such as "1e9" counts as the number it means."""
    if isinstance(value, bool) or value is None:
        raise WrongValue(f"{what} is expected")
    try:
        number = float(value) if not isinstance(value, int) else value
        if kind is int and (isinstance(number, float) and not number.is_integer()):
            raise ValueError
        return kind(number) if abs(number) < 1e15 else kind(int(number))
    except (TypeError, ValueError, OverflowError):
        raise WrongValue(f"{what} is expected") from None
