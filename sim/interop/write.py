"""A scenario as YAML text, a comment at every field that says where it comes from."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sim.interop.draft import Imported
from sim.scenario.schema import ScenarioFile
from sim.scenario.sections import model_in

PLAIN = re.compile(r"[\w./][\w./+-]*")
"""Text that is text in YAML without quotes."""
NOT_TEXT = re.compile(r"true|false|null|yes|no|on|off|\.nan|\.inf|[\d._]+(e[-+]?\d+)?|0[xo].*", re.IGNORECASE)
COMMENT_COLUMN, LONGEST_COMMENT = 34, 100


def scenario_text(imported: Imported, folder: Path) -> str:
    """The scenario file, to lie in `folder`: paths of other files are relative to it."""
    account = imported.account
    lines = [f"# From {Path(imported.file).name} ({imported.tool}), by `sim import`."]
    for title, entries in (("not expressible", account.not_expressible), ("unknown", account.unknown)):
        lines += [f"# {title}: {_plain(entry.name)} ({_plain(entry.text)})" for entry in entries]
    document = _in_order(imported.document, ScenarioFile)
    return "\n".join([*lines, *_section(document, (), imported.comments, folder)]) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: an interrupted run leaves what was there. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _section(
    data: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[tuple[str, ...], str], folder: Path
) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in data.items():
        place = (*path, key)
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from _section(value, place, comments, folder)
            continue
        if place == ("model", "config"):
            value = os.path.relpath(value, folder)
        line = f"{indent}{_scalar(key)}: {_flow(value)}"
        comment = _plain(comments.get(place, ""))
        yield f"{line.ljust(COMMENT_COLUMN)}  # {comment}" if comment else line


def _in_order(data: Mapping[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Fields in the order of the schema."""
    ordered = {}
    for name, field in section.model_fields.items():
        if name in data:
            inner, value = model_in(field.annotation), data[name]
            ordered[name] = _in_order(value, inner) if inner and isinstance(value, dict) else value
    return ordered


def _plain(text: str) -> str:
    """One short line of characters that YAML takes in a comment."""
    text = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return text if len(text) <= LONGEST_COMMENT else text[: LONGEST_COMMENT - 3] + "..."


def _flow(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and not NOT_TEXT.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=not str(value).isprintable())
