"""What would lower a peak: arithmetic on the owners' curves, no second model.

If all bytes of some owners were gone at every instant, the peak of the step would be the largest rest. A measure that
touches those owners alone cannot do better, so the rest is the best that the measure can do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.api import Outcome
from sim.model.catalogue import CHOICES
from sim.model.config import ModelConfig
from sim.program.program import Ints, Owner
from sim.report.notes import longest_region
from sim.scenario import is_field
from sim.scenario.parallel import Fsdp
from sim.scenario.setup import Checkpoint, Setup
from sim.timeline.memory import MemoryTimeline

WORTH_SAYING = 0.05  # of the peak
MOST = 0.5  # of the peak

OF_THE_STEP = ((Owner.LOSS,), (Owner.ACTIVATION,), (Owner.CHECKPOINT,), (Owner.RECOMPUTED,), (Owner.GATHERED,))
OF_THE_STATE = (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER)
FIELDS = {"offloading checkpoints": "offload"}
"""Measures that a scenario plays by a field of their own, where it has the field."""

Owners = tuple[Owner, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """`measure` acts on `owner` (or several); without any of their bytes the peak would be `peak_bytes`, there."""

    owner: str
    measure: str
    peak_bytes: int
    phase: str
    layer: str


def find_lever(outcome: Outcome) -> Lever | None:
    """The owners whose absence would lower the steady step's active peak most, if there is a measure against them.

    Measures against the model's states need more GPUs: they count only where there is no other, or where states are
    most of the peak.
    """
    memory = outcome.worst.shown
    curves = memory.owner_curves()
    state = sum(outcome.owners.get(owner, 0) for owner in OF_THE_STATE)
    groups: tuple[tuple[Owners, ...], ...] = (OF_THE_STEP, (OF_THE_STATE,))
    if state > MOST * outcome.peak.bytes:
        groups = ((*OF_THE_STEP, OF_THE_STATE),)
    for group in groups:
        levers = [
            _without(owners, measure, memory, curves)
            for owners in group
            if any(outcome.owners.get(owner, 0) for owner in owners)
            and (measure := measure_against(owners[0], outcome.setup)) is not None
        ]
        helping = [lever for lever in levers if 0 < lever.peak_bytes < (1 - WORTH_SAYING) * outcome.peak.bytes]
        if helping:
            return min(helping, key=lambda lever: lever.peak_bytes)
    return None


def _without(owners: Owners, measure: str, memory: MemoryTimeline, curves: dict[Owner, Ints]) -> Lever:
    first, last = memory.steps()[-1]
    rest = memory.active_bytes[first:last] - sum(curves[owner][first:last] for owner in owners if owner in curves)
    event = int(np.argmax(rest))
    phase, layer, _ = memory.program.where(int(memory.program.mem_where[first + event]))
    return Lever(
        owner=", ".join(owner.label for owner in owners),
        measure=with_field(measure),
        peak_bytes=int(rest[event]),
        phase=phase.name.lower(),
        layer=layer,
    )


def with_field(measure: str) -> str:
    """The measure with the field that plays it; a measure that no scenario can play yet says so."""
    field = FIELDS.get(measure)
    if field is None:
        return measure
    return f"{measure} ({field})" if is_field(field) else f"{measure} (which no scenario can play yet)"


def measure_against(owner: Owner, setup: Setup) -> str | None:
    """What people do about an owner under this set-up; None if nothing that the set-up does not do already."""
    checkpoint, fsdp = setup.checkpoint, setup.fsdp
    if owner == Owner.LOSS:
        chunked = isinstance(setup.model, ModelConfig) and setup.model.loss_chunks > 1
        if chunked:
            return "more chunks of the loss (model.loss_chunks)"
        if isinstance(setup.model, ModelConfig) and _has_liger(setup.model):
            fused = "fused_linear_cross_entropy"
            return None if fused in setup.model.liger else f"Liger's fused loss (model.liger: [{fused}])"
        if not _has_chunked_loss(setup) or setup.tensor.degree > 1:
            return "a chunked loss (which no scenario can play here yet)"
        shared = fsdp is not None or setup.family is not None or setup.pipeline is not None
        how = ", model.loss_chunking: projection" if shared else ""
        return f"a chunked loss (model.loss_chunks{how})"
    if owner == Owner.ACTIVATION:
        if setup.mode == "eval":
            return "running under torch.no_grad()"
        if setup.mode == "no_grad":
            return None
        if checkpoint is None:
            return "checkpointing layers"
        return "checkpointing more" if _leaves_layers(checkpoint) else None
    if owner == Owner.CHECKPOINT:
        if checkpoint is not None and checkpoint.save:
            return "saving fewer outputs"
        return None if setup.offload else "offloading checkpoints"
    if owner == Owner.RECOMPUTED:
        return "shorter regions" if longest_region(setup) > 1 else None
    if owner == Owner.GATHERED:
        return None if fsdp is None else _against_gathered(fsdp)
    if owner in OF_THE_STATE and setup.data is not None:
        return (
            None
            if setup.data.distributed_optimizer or setup.data.degree == 1
            else "sharding it (parallel.data.distributed_optimizer: true)"
        )
    if owner in OF_THE_STATE:
        return _against_states(setup)
    return None


def _against_states(setup: Setup) -> str:
    """A family that shards more, or more ranks."""
    if setup.zero is not None and setup.zero.stage < 3:
        return "a higher stage (parallel.zero.stage)"
    for name in ("fsdp", "fsdp1", "zero"):
        if getattr(setup, name) is not None:
            return f"sharding over more GPUs (parallel.{name}.degree)"
    return "sharding (parallel.fsdp)"


def _has_liger(model: ModelConfig) -> bool:
    """Has Liger kernels for the imitated code?"""
    return "liger" not in CHOICES[model.family, model.implementation]


def _has_chunked_loss(setup: Setup) -> bool:
    """Does the imitated code have one?"""
    model = setup.model
    return isinstance(model, ModelConfig) and CHOICES[model.family, model.implementation].get("loss_chunks") != (1,)


def _against_gathered(fsdp: Fsdp) -> str | None:
    """Blocks that stay gathered, then prefetching beyond FSDP2's own."""
    if fsdp.reshard_after_forward is False or type(fsdp.reshard_after_forward) is int:
        return "resharding blocks (parallel.fsdp.reshard_after_forward: true)"
    if fsdp.forward_prefetch > 1 or (fsdp.backward_prefetch or 0) > 1:
        return "prefetching fewer blocks (parallel.fsdp.forward_prefetch, backward_prefetch)"
    return None


def _leaves_layers(checkpoint: Checkpoint) -> bool:
    """Some of what layers save is kept."""
    partial = checkpoint.every > 1 or checkpoint.first or checkpoint.save or checkpoint.sequential
    return bool(partial or checkpoint.inside or checkpoint.discard or None in checkpoint.layers)
