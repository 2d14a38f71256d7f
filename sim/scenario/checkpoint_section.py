"""The vocabulary of checkpointing: what a region is, and which layers become regions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sim.scenario.kinds import Count, CountOrZero, Counts, Names
from sim.scenario.section import Section


class RegionSection(Section):
    """How a layer is checkpointed. {}: all of it, non-reentrant."""

    save: list[str] = Field(default=[])
    """Selective: outputs to keep instead of recomputing: attention, every_second_matmul, or aten names such as
    aten.mm. Default: [], recompute everything."""
    inside: Names = ()
    """Regions inside a layer instead of around it: attention, core_attention (Megatron's core_attn), mlp, norm, moe,
    shared_experts; one name or a list. Default: [], the whole layer."""
    discard: Names = ()
    """Parts whose output is thrown away once it was used and made again in backward: norm (Megatron's layernorm),
    activation (its moe_act for experts). One name or a list. Default: []."""
    early_stop: bool = True
    """Recomputation ends at the last tensor that is needed. Default: true; reentrant regions never stop early."""
    reentrant: bool = False
    """use_reentrant=True, as PyTorch's old form and Megatron's: forward runs under no_grad, and a backward of its own
    runs inside the backward. Takes no `save`. Default: false."""


LAYER_CHOICES: dict[str, dict[str, Any] | None] = {"full": {}, "none": None}


def _layer_choices(value: Any) -> tuple[Any, ...]:
    message = "a list of full, none, or settings such as {save: [attention]} is expected"
    if not isinstance(value, list):
        raise ValueError(message)
    choices = tuple(LAYER_CHOICES.get(entry, entry) if isinstance(entry, str) else entry for entry in value)
    if any(not isinstance(choice, dict | None) for choice in choices):
        raise ValueError(message)
    return choices


LayerChoices = Annotated[
    tuple[RegionSection | None, ...],
    BeforeValidator(_layer_choices, json_schema_input_type=list[RegionSection | Literal["full", "none"] | None]),
]


class CheckpointSection(RegionSection):
    """Activation checkpointing. {}: every layer in full; `checkpoint: null`: none (the default).

    At most one form of regions: `sequential`, `nested`, `boundaries` or `layers`, else `every`, `segment` and `first`."""

    every: Count = 1
    """Checkpoint every k-th region: 2 recomputes layers 1, 3, 5, ... Default: 1, all."""
    segment: Count = 1
    """Consecutive layers in one region. Default: 1."""
    first: Count | None = None
    """Only regions within the first so many layers. Default: null, all layers."""
    sequential: Count | None = None
    """checkpoint_sequential with so many segments; the last one is not checkpointed. Default: null."""
    nested: Counts = ()
    """Regions within regions, counts from the outside: [2, 2] makes two regions of two regions each. Default: []."""
    boundaries: Counts = ()
    """Regions of unequal length: the layers that begin one, e.g. [3, 7, 20]; the first begins at 0. Default: []."""
    layers: LayerChoices = ()
    """A choice per layer: full, none, or settings such as {save: [attention]}; a shorter list repeats. Default: []."""
    keep_micro_batches: CountOrZero = 0
    """With a pipeline: a stage keeps the activations of so many micro-batches in flight and recomputes only the others
    (Korthikanti et al. 2022, appendix C). Default: 0, recompute all."""
