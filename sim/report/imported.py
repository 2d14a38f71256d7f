"""What became of the fields of a file that was imported."""

from __future__ import annotations

import textwrap
from typing import Any

from sim.interop import Entry, Imported

TITLES = {
    "used": "used",
    "assumed": "assumed: the file does not say it",
    "not_expressible": "not expressible: has an effect that the scenario does not say",
    "unknown": "unknown",
}
WIDTH = 118


def account_text(imported: Imported) -> str:
    """The lists as text: used, assumed, not expressible, unknown, and in short those without effect."""
    account = imported.account
    blocks = []
    for name, title in TITLES.items():
        if entries := getattr(account, name):
            blocks.append("\n".join([title, *_rows(entries)]))
    if account.ignored:
        names = ", ".join(dict.fromkeys(entry.name for entry in account.ignored))
        wrapped = textwrap.wrap(names, WIDTH - 2, break_on_hyphens=False)
        blocks.append("\n".join(["without effect on time and memory", *(f"  {line}" for line in wrapped)]))
    return "\n\n".join(blocks)


def account_json(imported: Imported, text: str) -> dict[str, Any]:
    """The scenario's text and every list, for programs."""
    lists = {
        name: [
            {"name": entry.name, "line": entry.line, "text": entry.text} for entry in getattr(imported.account, name)
        ]
        for name in (*TITLES, "ignored")
    }
    return {"tool": imported.tool, "file": imported.file, **lists, "scenario": text}


def _rows(entries: list[Entry]) -> list[str]:
    places = ["" if entry.line is None else f"line {entry.line}" for entry in entries]
    place_width = max(map(len, places))
    name_width = max(len(entry.name) for entry in entries)
    return [
        f"  {place.ljust(place_width)}  {entry.name.ljust(name_width)}  {entry.text}".rstrip()
        if place_width
        else f"  {entry.name.ljust(name_width)}  {entry.text}".rstrip()
        for place, entry in zip(places, entries)
    ]
