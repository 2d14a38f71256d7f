"""The vocabulary of torch.compile."""

from __future__ import annotations

from sim.scenario.section import Section


class CompileSection(Section):
    """torch.compile, block by block as torchtitan does (each TransformerBlock, checkpointing inside). `compile: {}`
    compiles, `compile: null` does not (the default)."""
