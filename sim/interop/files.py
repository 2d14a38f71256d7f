"""Files of settings as plain values with lines: YAML, JSON (which is YAML but for tabs and twice-given keys) and TOML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sim.interop.draft import ImportProblems
from sim.scenario.load import read_document
from sim.scenario.load import read_text as read_plain_text
from sim.scenario.problems import Problem, ScenarioError

LARGEST_FILE_BYTES = 4_000_000


class Lined(dict[str, Any]):
    """A mapping that knows the line of each of its keys."""

    lines: dict[str, int]


def read_text(path: Path) -> str:
    """The text of a file. Raises ImportProblems."""
    if path.is_file() and path.stat().st_size > LARGEST_FILE_BYTES:
        raise ImportProblems([Problem(file=str(path), message="is too large for a file of settings")])
    try:
        return read_plain_text(path)
    except ScenarioError as error:
        raise ImportProblems(error.problems) from None


def read_yaml(text: str, file: str) -> Lined:
    """A YAML or JSON mapping. Raises ImportProblems for anything else."""
    try:
        document = read_document(text.replace("\t", "  "), file)
    except ScenarioError as error:
        said = "is empty" if not text.strip() else None
        raise ImportProblems(
            [
                Problem(file=p.file, line=p.line, path=p.path, message=said or _as_settings(p.message))
                for p in error.problems
            ]
        ) from None
    if document.problems:
        raise ImportProblems(document.problems)
    lines = {path: origin.line for path, origin in document.origins.items()}
    return _lined(document.data, (), lines)


def _as_settings(message: str) -> str:
    return "names with values are expected" if message.startswith("sections are expected") else message


def _lined(data: Mapping[str, Any], path: tuple[str | int, ...], lines: Mapping[Any, int | None]) -> Lined:
    result = Lined()
    result.lines = {}
    for key, value in data.items():
        result[key] = _lined(value, (*path, key), lines) if isinstance(value, dict) else value
        result.lines[key] = lines.get((*path, key)) or 0
    return result


def read_json(text: str, file: str) -> Lined:
    """As read_yaml, for files that must be JSON."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise ImportProblems([Problem(file=file, line=line, message=f"not JSON: {error}"[:120])]) from None
    if not isinstance(data, dict):
        raise ImportProblems([Problem(file=file, message="names with values are expected")])
    return read_yaml(text, file)


def read_toml(text: str, file: str) -> Lined:
    """A TOML file; lines are those of `name = value` under its [section]."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ImportProblems([Problem(file=file, message=f"not TOML: {error}"[:120])]) from None
    lines: dict[Any, int | None] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[([\w.\"-]+)\]", line):
            section = tuple(match[1].replace('"', "").split("."))
            lines[section] = number
        elif match := re.match(r"\s*([\w.-]+)\s*=", line):
            lines[*section, *match[1].split(".")] = number
    return _lined(data, (), lines)


def flat(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, int | None]]:
    """Path, value and line of every value that is no mapping."""
    lines = data.lines if isinstance(data, Lined) else {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value, lines.get(key) or None
