"""A document as one YAML text that needs no other file, and single strategies of it with something changed."""

from __future__ import annotations

import io
import os
from copy import deepcopy
from typing import Any

from ruamel.yaml import YAML

from sim.scenario.document import Document, Path
from sim.scenario.load import beside, load_text_document
from sim.scenario.names import is_own_profile
from sim.scenario.sections import strategies_of


def dumped(document: Document) -> str:
    """The document with `extends` and overrides worked in; loading it gives the same set-ups."""
    data = deepcopy(document.data)
    data.pop("extends", None)
    strategies = document.value(("strategies",))
    owners: list[Path] = [(), *(("strategies", name) for name in (strategies if isinstance(strategies, dict) else ()))]
    for owner in owners:
        for path in ((*owner, "model", "config"), (*owner, "profile")):
            name = document.value(path)
            if isinstance(name, str) and (path[-1] == "config" or is_own_profile(name)):
                _set(data, path, os.path.abspath(beside(document.origin(path), name)))
    return _text(data)


def only_strategy(text: str, name: str, changes: dict[str, Any]) -> str:
    """A dumped document with the strategy `name` alone, in which fields (dotted paths) have other values.

    A section that is given as a whole takes the place of the one there was.
    """
    complete = dict(strategies_of(load_text_document(text, name)))[name]
    data = deepcopy(complete.data)
    for path, value in changes.items():
        _set(data, tuple(path.split(".")), value)
    data["strategies"] = {name: {}}
    return _text(data)


def _set(data: dict[Any, Any], path: Path, value: Any) -> None:
    *sections, last = path
    for section in sections:
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data = data[section]
    data[last] = value


def _text(data: dict[str, Any]) -> str:
    """YAML 1.2, a line per section."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 1 << 16
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()
