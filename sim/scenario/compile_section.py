"""The vocabulary of torch.compile."""

from __future__ import annotations

from sim.scenario.section import Section


class CompileSection(Section):
    """torch.compile, block by block as torchtitan does (each TransformerBlock, checkpointing inside). `compile: {}`
    compiles, `compile: null` does not (the default)."""

    loss: bool = False
    """The loss is compiled too, as torchtitan does since 2025: logits stay in their dtype, and log probabilities never
    are in memory. For torchtitan on one GPU or under fsdp. Default: false."""
