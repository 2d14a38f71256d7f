"""The network of a file: which preset it is or starts from, and which choices the imitated code can make."""

from __future__ import annotations

from typing import Any

from sim.interop.draft import Draft
from sim.model.catalogue import CHOICES, implementations_of, preset_names, preset_shapes
from sim.model.config import Family

PLAIN = ("family", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "max_positions", "tied_embeddings")
BASES: dict[Family, str] = {"llama": "llama-2-7b", "gpt": "gpt2-small"}


def put_preset(draft: Draft, family: Family, shapes: dict[str, Any], has_experts: bool = False) -> None:
    """The preset of these shapes, or any of the family: the scenario says every shape all the same."""
    if draft.override("model.preset") or draft.override("model.config"):
        return
    wanted = {"family": family, **shapes}
    for name in preset_names():
        known = preset_shapes(name)
        known = {"kv_heads": known["heads"], **known}
        if not has_experts and set(known) <= set(PLAIN) and wanted.items() <= known.items():
            draft.put("model.preset", name, note="has these shapes")
            return
    draft.put("model.preset", BASES[family], note=f"any {family}: all its shapes are given below")


def choose(draft: Draft, field: str, value: Any, *names: str, what: str) -> None:
    """A choice of the network, if the imitated code has it; else what it is cannot be said."""
    section = draft.document.data.get("model", {})
    shapes = preset_shapes(section["preset"]) if section.get("preset") in preset_names() else {"family": "llama"}
    family: Family = "gpt" if shapes["family"] == "gpt" else "llama"
    code = section.get("implementation") or implementations_of(family)[0]
    allowed = CHOICES[family, code].get(field, (value,)) if (family, code) in CHOICES else (value,)
    if value in allowed:
        draft.put(f"model.{field}", value, *names)
    else:
        draft.cannot(names[0], f"{what}: {code}'s {family} has {field} {' or '.join(map(str, allowed))}")
