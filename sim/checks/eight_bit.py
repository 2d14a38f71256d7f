"""Whose 8-bit numbers a row speaks of: torchao's under torch.compile, or Transformer Engine's."""

from __future__ import annotations

import re

from sim.checks.facts import Facts
from sim.checks.software import software_of
from sim.checks.training import is_four_bit, steps_in_backward

EIGHT_BIT = r"fp8|float8|mxfp8|nvfp4|fp4|int8|nf4|bnb"
"""Words of numbers below 16 bit."""


def has_offload(facts: Facts) -> bool:
    """Does anything wait in host memory?"""
    return facts.text.get("offload", "").lower() not in ("", "none", "no")


def compiled(facts: Facts) -> bool:
    """With offload, adapters on four-bit weights, steps inside backward, or ranks that share layers (but torchtitan's),
    blocks are played in eager mode."""
    shared = facts.tp * facts.cp > 1 and software_of(facts).llama != "torchtitan"
    eager = has_offload(facts) or is_four_bit(facts) or steps_in_backward(facts) or shared
    return facts.says("compile", "^yes") and not eager


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
    return software_of(facts).stores_fp8 and fp8_recipe(facts) in ("delayed", "tensorwise")


def compile_section(facts: Facts) -> dict[str, bool]:
    """What is compiled beside the blocks: the loss, where the software does so."""
    return {"loss": True} if software_of(facts).compiled_loss and facts.pp * facts.tp == 1 else {}
