"""The largest micro-batch that fits: every candidate is simulated; owners at the peak only say where to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sim.api import STEPS, Outcome, fit_memory
from sim.model.config import ModelConfig
from sim.program.program import Owner
from sim.runtime.record import record
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


def fits(setup: Setup, micro_batch: int) -> bool:
    """Does the run get through all steps with this micro-batch?"""
    candidate = replace(setup, batch=replace(setup.batch, micro_batch=micro_batch))
    return fit_memory(candidate, record(candidate, STEPS))[0].out_of_memory is None


def largest_micro_batch(outcome: Outcome, test: Callable[[Setup, int], bool] = fits) -> LargestMicroBatch | None:
    """Search around a simulated outcome; None for the chain, which has no batch.

    The bytes at the peak that grow with the micro-batch give a first guess; from there the search steps (doubling) to a
    fitting and a failing size, and halves between them.
    """
    setup = outcome.setup
    if not isinstance(setup.model, ModelConfig):
        return None
    known = {setup.batch.micro_batch: outcome.fits}
    simulated: list[int] = []

    def try_size(size: int) -> bool:
        if size not in known:
            known[size] = test(setup, size)
            simulated.append(size)
        return known[size]

    guess = max(1, min(_guess(outcome), LARGEST_CONSIDERED))
    low, high = 0, LARGEST_CONSIDERED + 1
    size, step = guess, 1
    while try_size(size):
        low = size
        if size + 1 >= high:
            return LargestMicroBatch(low, tuple(simulated))
        size, step = min(size + step, LARGEST_CONSIDERED), step * 2
        if size == low:
            return LargestMicroBatch(low, tuple(simulated))
    high, step = size, 1
    while low == 0 and high > 1:
        size = max(1, high - step)
        if try_size(size):
            low = size
        else:
            high, step = size, step * 2
    while high - low > 1:
        middle = (low + high) // 2
        if try_size(middle):
            low = middle
        else:
            high = middle
    return LargestMicroBatch(low, tuple(simulated))


def _guess(outcome: Outcome) -> int:
    """Where capacity would be reached if what grows with the batch at the peak grew alone."""
    present = outcome.setup.batch.micro_batch
    growing = sum(outcome.owners.get(owner, 0) for owner in _SCALES_WITH_BATCH)
    if growing <= 0:
        return present
    per_sequence = growing / present
    return present + int((outcome.capacity_bytes - outcome.steady.reserved_bytes) // per_sequence)
