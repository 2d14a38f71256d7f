"""What would lower a peak: arithmetic on the owners' curves, no second model.

If all bytes of one owner were gone at every instant, the peak of the step would be the largest rest. A measure that
touches that owner alone cannot do better, so the rest is the best that the measure can do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.api import Outcome
from sim.model.config import ModelConfig
from sim.program.program import Ints, Owner
from sim.report.notes import longest_region
from sim.scenario.setup import Checkpoint, Setup
from sim.timeline.memory import MemoryTimeline

WORTH_SAYING = 0.05  # of the peak

OF_THE_STEP = (Owner.LOSS, Owner.ACTIVATION, Owner.CHECKPOINT, Owner.RECOMPUTED)
OF_THE_STATE = (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """`measure` acts on `owner`; without any of the owner's bytes the peak would be `peak_bytes`, there."""

    owner: str
    measure: str
    peak_bytes: int
    phase: str
    layer: str


def find_lever(outcome: Outcome) -> Lever | None:
    """The owner whose absence would lower the steady step's active peak most, if there is a measure against it.

    Measures that need more GPUs count only where there is no other.
    """
    memory = outcome.memory if outcome.fits else outcome.unlimited
    curves = memory.owner_curves()
    for group in (OF_THE_STEP, OF_THE_STATE):
        levers = [
            _without(owner, measure, memory, curves[owner])
            for owner in group
            if outcome.owners.get(owner, 0) and (measure := measure_against(owner, outcome.setup)) is not None
        ]
        helping = [lever for lever in levers if 0 < lever.peak_bytes < (1 - WORTH_SAYING) * outcome.peak.bytes]
        if helping:
            return min(helping, key=lambda lever: lever.peak_bytes)
    return None


def _without(owner: Owner, measure: str, memory: MemoryTimeline, curve: Ints) -> Lever:
    first, last = memory.steps()[-1]
    rest = memory.active_bytes[first:last] - curve[first:last]
    event = int(np.argmax(rest))
    phase, layer, _ = memory.program.where(int(memory.program.mem_where[first + event]))
    return Lever(owner=owner.label, measure=measure, peak_bytes=int(rest[event]), phase=phase.name.lower(), layer=layer)


def measure_against(owner: Owner, setup: Setup) -> str | None:
    """What people do about an owner under this set-up; None if nothing that the set-up does not do already."""
    checkpoint, fsdp = setup.checkpoint, setup.fsdp
    if owner == Owner.LOSS:
        chunked = isinstance(setup.model, ModelConfig) and setup.model.loss_chunks > 1
        return "more chunks of the loss" if chunked else "a chunked loss"
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
    if owner in OF_THE_STATE and setup.data is not None and not setup.data.distributed_optimizer:
        return "a distributed optimizer"
    if owner in OF_THE_STATE:
        return "sharding over more GPUs" if fsdp is not None or setup.data is not None else "sharding (fsdp)"
    return None


def _leaves_layers(checkpoint: Checkpoint) -> bool:
    """Some of what layers save is kept."""
    partial = checkpoint.every > 1 or checkpoint.first or checkpoint.save or checkpoint.sequential
    return bool(partial or checkpoint.inside or checkpoint.discard or None in checkpoint.layers)
