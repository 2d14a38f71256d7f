"""Which parts of a layer a published row recomputes, by its label and by Megatron's modules in its notes."""

from __future__ import annotations

import re

from sim.checks.facts import Facts
from sim.checks.recipes import recipe_of

INSIDE = (
    (r"selective_attention|core_attn", "core_attention"),
    (r"recompute-ffn|selective_op \(MLP\)|module mlp\b", "mlp"),
    (r"module moe\b", "moe"),
    (r"shared_experts", "shared_experts"),
)
DISCARDED = (
    (r"recompute-norm|\+ norm|layernorm", "norm"),
    (r"recompute-swiglu|activation func|moe_act", "activation"),
)
REGIONS = "|".join(words for words, _ in INSIDE)
PARTS = "|".join(words for words, _ in INSIDE + DISCARDED)
"""Words of a label, and the schema's names of the parts of a layer that they speak of."""


def parts(facts: Facts, names: tuple[tuple[str, str], ...]) -> list[str]:
    """The schema's names of the parts of a layer that the row's label speaks of."""
    return [name for words, name in names if re.search(words, recomputed(facts), re.IGNORECASE)]


def recomputed(facts: Facts) -> str:
    """The row's label of recomputation, with Megatron's modules where the notes name them; where the row says nothing, the
    modules of its recipe."""
    printed = facts.text.get("recompute", "")
    modules = re.search(r"modules=(?!none)([\w+]+)", facts.text.get("notes", ""))
    named = modules[1].split("+") if modules else [] if printed else list(recipe_of(facts).recompute)
    return " ".join([printed, *(f"module {name}" for name in named)])
