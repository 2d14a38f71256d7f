"""When does memory repeat itself? The first steps differ; after that a step repeats the one before, or a cycle of steps.

The second step still asks the driver for what the optimizer's states displaced. Near the limit the cache may be given
back and rebuilt every few steps: then no single step is the steady one, but a cycle of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.timeline.memory import MemoryTimeline


@dataclass(frozen=True, slots=True)
class Cycle:
    """Steps `first` .. `first + period - 1` repeat for ever; `settled` False: they had not repeated when we stopped."""

    first: int
    period: int
    settled: bool = True

    @property
    def steps(self) -> int:
        """Steps up to the end of the cycle."""
        return self.first + self.period


def find_cycle(memories: Sequence[MemoryTimeline]) -> Cycle | None:
    """The first step after the first two that equals an earlier one on every rank; None if none does.

    Equal: the same allocated, active and reserved bytes after every event, and the same driver calls.
    """
    ranges = [memory.steps() for memory in memories]
    for step in range(2, min(map(len, ranges))):
        for earlier in range(step - 1, 0, -1):
            if all(_equal(m, r[earlier], r[step]) for m, r in zip(memories, ranges)):
                return Cycle(earlier, step - earlier)
    return None


def _equal(memory: MemoryTimeline, a: tuple[int, int], b: tuple[int, int]) -> bool:
    columns = (memory.reserved_bytes, memory.active_bytes, memory.allocated_bytes)
    if not all(np.array_equal(column[slice(*a)], column[slice(*b)]) for column in columns):
        return False
    return _driver_calls(memory, a) == _driver_calls(memory, b)


def _driver_calls(memory: MemoryTimeline, step: tuple[int, int]) -> list[tuple[int, str, int]]:
    first, last = step
    return [(event - first, action, size) for event, action, size in memory.driver_calls if first <= event < last]
