"""Whose 8-bit numbers a row speaks of: torchao's under torch.compile, or Transformer Engine's."""

from __future__ import annotations

import re

from sim.checks.compiling import compiled
from sim.checks.facts import Facts
from sim.checks.software import software_of

EIGHT_BIT = r"fp8|float8|mxfp8|nvfp4|fp4|int8|nf4|bnb"
"""Words of numbers below 16 bit."""


def uses_float8(facts: Facts) -> bool:
    """torchao's linears, which torchtitan compiles; Transformer Engine's and LLMQ's are other programs."""
    return facts.says("precision", "float8") and compiled(facts)


def fp8_recipe(facts: Facts) -> str | None:
    """How Transformer Engine scales in Megatron's software: the first that the row names, else that of its recipes."""
    named = facts.text.get("precision", "").lower().partition("(fp")[0]
    if software_of(facts).gpt != "megatron" or not re.search("fp8|nvfp4", named):
        return None
    if "nvfp4" in named:
        return "nvfp4"
    recipes = (
        (r"mx", "mxfp8"),
        (r"blockwise|128x128", "blockwise"),
        (r"cs|current|tensorwise", "tensorwise"),
        (r"delayed|ds", "delayed"),
    )
    return next((recipe for words, recipe in recipes if re.search(words, named)), software_of(facts).fp8)


def stores_fp8(facts: Facts) -> bool:
    """Weights of 8-bit products have no 16-bit form beside them."""
    return software_of(facts).stores_fp8 and fp8_recipe(facts) in ("delayed", "tensorwise")
