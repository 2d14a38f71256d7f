"""What a setting cannot do here, and why: sentences for people, from the set-up and the owners at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from sim.api import Outcome
from sim.model.config import ModelConfig
from sim.program.program import Owner, Phase
from sim.scenario.setup import Setup
from sim.units import format_bytes

SAVED = (Owner.ACTIVATION, Owner.CHECKPOINT, Owner.RECOMPUTED)
STATE = (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER, Owner.GATHERED, Owner.REDUCE_SCATTER)
HEADS = ("loss", "output", "head", "lm_head", "output_layer")
FEW = 0.1  # of the peak
MUCH = 0.25
WAITING = 0.01


def notes(outcome: Outcome) -> tuple[str, ...]:
    """Whole sentences; none where every setting does what it is for."""
    return tuple(_notes(outcome))


def _notes(outcome: Outcome) -> Iterator[str]:
    setup, peak = outcome.setup, outcome.peak
    if setup.checkpoint is not None:
        yield from _about_checkpoint(outcome)
    early = peak.phase in (Phase.FORWARD, Phase.LOSS) or peak.path in HEADS
    if setup.optimizer is not None and setup.optimizer.in_backward and early:
        yield "Steps inside backward do not lower this peak: it comes before most gradients do."
    experts = setup.model.experts if isinstance(setup.model, ModelConfig) else None
    if experts is not None and experts.imbalance == 1:
        yield "Every expert gets as many tokens as any other: assumed (model.experts.imbalance says otherwise)."
    if setup.mode == "eval":
        yield "Without torch.no_grad() a graph is built that nobody walks back: its activations live until the loss dies."
    waiting = outcome.steady.active_bytes - outcome.steady.allocated_bytes
    if waiting > WAITING * peak.bytes:
        yield (
            f"Of the peak {format_bytes(waiting)} are freed and wait for streams that used them (record_stream): how much"
            " depends on the times, so that this figure is as good as they are."
        )


def _about_checkpoint(outcome: Outcome) -> Iterator[str]:
    setup, owners, peak = outcome.setup, outcome.owners, outcome.peak
    checkpoint = setup.checkpoint
    assert checkpoint is not None
    if setup.mode == "no_grad":
        yield "Checkpointing has no effect under no_grad: nothing is saved, nothing recomputed."
        return
    saved = sum(owners.get(owner, 0) for owner in SAVED)
    state = sum(owners.get(owner, 0) for owner in STATE)
    if saved < FEW * peak.bytes:
        rest = "the loss is" if owners.get(Owner.LOSS, 0) > state else "parameters, gradients and optimizer states are"
        yield f"More checkpointing hardly lowers this peak: activations are {saved / peak.bytes:.0%} of it, {rest} more."
    longest = longest_region(setup)
    again = owners.get(Owner.RECOMPUTED, 0)
    if longest > 1 and again > MUCH * peak.bytes:
        yield f"The regions are long: one of {longest} layers holds {format_bytes(again)} of the peak while it runs again."
    core = "core_attention" in checkpoint.inside
    if core and isinstance(setup.model, ModelConfig) and setup.model.attention == "sdpa":
        yield "The fused attention kernel keeps no scores: recomputing it saves next to nothing."


def longest_region(setup: Setup) -> int:
    """Layers that are recomputed at once."""
    checkpoint, layers = setup.checkpoint, setup.model.layers
    if checkpoint is None or checkpoint.layers or checkpoint.inside or checkpoint.discard:
        return 1
    if checkpoint.boundaries:
        edges = (0, *checkpoint.boundaries, layers)
        return max(stop - start for start, stop in pairwise(edges))
    if checkpoint.sequential is not None:
        return layers // checkpoint.sequential
    for count in checkpoint.nested:
        layers = -(-layers // count)
    return layers if checkpoint.nested else checkpoint.segment
