"""The largest micro-batch that fits: every candidate is simulated; closed forms only say where to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from sim.api import Outcome, device_memory, settle
from sim.model.config import ModelConfig
from sim.program.program import Owner
from sim.runtime.record import record, steps_to_record
from sim.scenario.setup import Setup

LARGEST_CONSIDERED = 4096
_SCALES_WITH_BATCH = (
    Owner.ACTIVATION, Owner.CHECKPOINT, Owner.RECOMPUTED, Owner.ACTIVATION_GRADIENT, Owner.LOSS, Owner.OTHER,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LargestMicroBatch:
    """`size` sequences per GPU and micro-batch fit, size + 1 do not (0: not even one). `simulated`: candidates played."""

    size: int
    simulated: tuple[int, ...]


def reserved_bytes(setup: Setup, micro_batch: int, fullest: int = 0) -> int | None:
    """Peak of reserved bytes with this micro-batch; None if the run does not get through all steps. Of a pipeline the
    rank `fullest` is looked at first: where that one does not fit, the others do not matter."""
    candidate = replace(setup, batch=replace(setup.batch, micro_batch=micro_batch))
    if candidate.stages > 1:
        program = record(candidate, steps_to_record(candidate), rank=fullest)
        if device_memory(candidate, program).out_of_memory is not None:
            return None
    _, memories, _ = settle(candidate)
    if any(memory.out_of_memory is not None for memory in memories):
        return None
    return max(int(memory.reserved_bytes.max(initial=0)) for memory in memories)


def largest_micro_batch(
    outcome: Outcome, measure: Callable[[Setup, int], int | None] | None = None
) -> LargestMicroBatch | None:
    """Search around a simulated outcome; None for the chain, which has no batch.

    Reserved bytes grow nearly linearly with the micro-batch: the bytes at the peak that grow with it give the first
    slope, two fitting candidates a better one. The answer is certain only when `size` fits and `size + 1` does not.
    """
    setup = outcome.setup
    fullest = next(rank for rank, own in enumerate(outcome.ranks) if own is outcome.worst)
    measure = measure or partial(reserved_bytes, fullest=fullest)
    if not isinstance(setup.model, ModelConfig):
        return None
    present = setup.batch.micro_batch
    fitting = {present: outcome.steady.reserved_bytes} if outcome.fits else {}
    failing = set() if outcome.fits else {present}
    slope = sum(outcome.owners.get(owner, 0) for owner in _SCALES_WITH_BATCH) / present
    simulated: list[int] = []
    while True:
        low, high = max(fitting, default=0), min(failing, default=LARGEST_CONSIDERED + 1)
        if high - low == 1:
            return LargestMicroBatch(low, tuple(simulated))
        if len(fitting) > 1:
            first = min(fitting)
            slope = (fitting[low] - fitting[first]) / (low - first)
        guess = _reach(low, fitting.get(low), slope, outcome.capacity_bytes) if fitting else high // 2
        size = min(max(guess, low + 1), high - 1)
        if size > low + 1 and simulated and size == high - 1 and high <= LARGEST_CONSIDERED and guess >= high:
            size = (low + high) // 2  # the line promised more than there was: halve
        simulated.append(size)
        reserved = measure(setup, size)
        if reserved is None:
            failing.add(size)
        else:
            fitting[size] = reserved


def _reach(size: int, reserved: int | None, slope: float, capacity: int) -> int:
    """Where the line through (size, reserved) meets the capacity."""
    if reserved is None or slope <= 0:
        return size + 1
    return size + int((capacity - reserved) // slope)
