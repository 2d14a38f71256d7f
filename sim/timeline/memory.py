"""What memory held over a run: per event the device's counters, per allocation its life and owner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from sim.program.program import Ints, Mem, Owner, Phase, Program


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    """An allocation that found no memory. `event` is its position among the program's memory events."""

    event: int
    requested_bytes: int
    driver_bytes: int
    """What the driver refused: "Tried to allocate" in PyTorch's message."""
    device_free_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """One rank's memory. Arrays have one entry per memory event that happened (`played` of the program's).

    `active` counts what cannot be reused yet, `allocated` what tensors hold, `reserved` what the driver has given.
    """

    program: Program
    allocated_bytes: Ints
    active_bytes: Ints
    reserved_bytes: Ints
    block_bytes: Ints
    address: Ints
    driver_calls: tuple[tuple[int, str, int], ...]
    """(event, action, bytes) of every call that left the cache."""
    out_of_memory: OutOfMemoryEvent | None

    @property
    def played(self) -> int:
        return len(self.allocated_bytes)

    @cached_property
    def born(self) -> Ints:
        """Per handle: the event that allocated it (events of the whole program)."""
        events = np.flatnonzero(self.program.mem_kind[: self.played] == Mem.ALLOC)
        born = np.full(len(self.program.owners), self.played, np.int64)
        born[self.program.mem_handle[events]] = events
        return born

    @cached_property
    def died(self) -> Ints:
        """Per handle: the event that freed it, or `played` if it never died."""
        events = np.flatnonzero(self.program.mem_kind[: self.played] == Mem.FREE)
        died = np.full(len(self.program.owners), self.played, np.int64)
        died[self.program.mem_handle[events]] = events
        return died

    @cached_property
    def size_bytes(self) -> Ints:
        """Per handle: the block it got."""
        sizes = np.zeros(len(self.program.owners), np.int64)
        events = np.flatnonzero(self.program.mem_kind[: self.played] == Mem.ALLOC)
        sizes[self.program.mem_handle[events]] = self.block_bytes[events]
        return sizes

    def live_at(self, event: int) -> Ints:
        """Handles that are alive right after `event`."""
        return np.flatnonzero((self.born <= event) & (self.died > event))

    def owners_at(self, event: int) -> dict[Owner, int]:
        """Bytes per owner right after `event`, largest first; they sum to the allocated bytes."""
        live = self.live_at(event)
        totals = np.bincount(self.program.owners[live], weights=self.size_bytes[live], minlength=len(Owner))
        order = np.argsort(-totals, kind="stable")
        return {Owner(int(i)): int(totals[i]) for i in order if totals[i] > 0}

    def owner_curves(self) -> dict[Owner, Ints]:
        """Bytes per owner after every event: arrays of length `played`."""
        kind, handle = self.program.mem_kind[: self.played], self.program.mem_handle[: self.played]
        sign = np.where(kind == Mem.ALLOC, 1, np.where(kind == Mem.FREE, -1, 0))
        change = sign * self.size_bytes[handle]
        owner = self.program.owners[handle]
        return {o: np.cumsum(np.where(owner == o, change, 0)) for o in Owner if (owner == o).any()}

    def until(self, program: Program) -> MemoryTimeline:
        """The same timeline of the program's beginning: `program` is a cut of this one's."""
        events = min(len(program.mem_kind), self.played)
        return MemoryTimeline(
            program=program,
            allocated_bytes=self.allocated_bytes[:events],
            active_bytes=self.active_bytes[:events],
            reserved_bytes=self.reserved_bytes[:events],
            block_bytes=self.block_bytes[:events],
            address=self.address[:events],
            driver_calls=tuple(call for call in self.driver_calls if call[0] < events),
            out_of_memory=self.out_of_memory if self.played < len(program.mem_kind) else None,
        )

    def mark(self, name: str) -> int | None:
        """Memory events before a mark; None if the run did not get there."""
        for mark in self.program.marks:
            if mark.name == name:
                return mark.memory_events if mark.memory_events <= self.played else None
        return None

    def steps(self) -> list[tuple[int, int]]:
        """Ranges of memory events of each step that was finished or begun: [first, last)."""
        return step_ranges([(m.name, m.memory_events) for m in self.program.marks], self.played)


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest value of a counter in a range of events, and where it was."""

    bytes: int
    event: int
    phase: Phase
    path: str
    operator: str


def peak(memory: MemoryTimeline, counter: Ints, first: int, last: int) -> Peak:
    """Peak of `counter` (one of the timeline's arrays) over events first..last-1; zero where the range is empty."""
    if last <= first:
        return Peak(0, 0, Phase.INIT, "", "")
    event = first + int(np.argmax(counter[first:last]))
    phase, path, operator = memory.program.where(int(memory.program.mem_where[event]))
    return Peak(int(counter[event]), event, phase, path, operator)


@cache
def _step_of(mark: str) -> int:
    return int(mark[1:].split(".")[0]) if mark[0] == "s" and mark[1:2].isdigit() else -1


def step_ranges(marks: list[tuple[str, int]], end: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of steps s0, s1, ... from marks named "s0.fwd0" etc.; the last step may be unfinished."""
    borders: list[int] = []
    number = -1
    previous = 0
    for name, position in marks:
        step = _step_of(name)
        if step > number:
            borders.append(previous)
            number = step
        previous = min(position, end)
    if not borders:
        return [(previous, end)] if end > previous else []
    borders.append(end)
    return [(a, b) for a, b in pairwise(borders) if b > a or a < end]
