"""Stories: one allocation's life. Made when and by what, kept for whom, freed when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.program.program import Mem, Owner, Phase
from sim.timeline.memory import MemoryTimeline


@dataclass(frozen=True, slots=True)
class Moment:
    """A memory event and where in the program it happened."""

    event: int
    step: int
    """0, 1, ...; -1 before the first step."""
    phase: Phase
    path: str
    operator: str

    def __str__(self) -> str:
        place = f"{self.path} {self.operator}".strip() or "the script"
        when = "set-up" if self.step < 0 else f"step {self.step}"
        return f"{when}, {self.phase.name.lower()}: {place}"


@dataclass(frozen=True, slots=True)
class Story:
    """One allocation. `freed` is where its last holder let go (None: alive at the end): an activation that the backward
    of X frees was kept for X."""

    handle: int
    bytes: int
    block_bytes: int
    address: int
    stream: int
    owner: Owner
    made: Moment
    freed: Moment | None

    def __str__(self) -> str:
        end = f"freed in {self.freed}" if self.freed is not None else "alive at the end"
        return f"#{self.handle} {self.bytes} bytes ({self.owner.label}): made in {self.made}; {end}"


def stories(memory: MemoryTimeline, path: str, step: int = -1) -> list[Story]:
    """Lives of all allocations made under a module path (the module itself and what is inside) in one step.

    `step`: 0, 1, ..., or -1 for the last one. Empty where nothing is made there.
    """
    ranges = memory.steps()
    step = step % len(ranges)
    first, last = ranges[step]
    program = memory.program
    events = np.arange(first, min(last, memory.played))
    events = events[program.mem_kind[events] == Mem.ALLOC]
    found = []
    for event in events.tolist():
        made = moment(memory, event)
        if made.path == path or made.path.startswith(path + "."):
            found.append(story(memory, int(program.mem_handle[event])))
    return found


def story(memory: MemoryTimeline, handle: int) -> Story:
    """The life of one allocation. Raises IndexError for a handle that the run never made."""
    program = memory.program
    born, died = int(memory.born[handle]), int(memory.died[handle])
    if born >= memory.played:
        raise IndexError(f"allocation {handle} of {int((memory.born < memory.played).sum())}")
    return Story(
        handle=handle,
        bytes=int(program.mem_bytes[born]),
        block_bytes=int(memory.block_bytes[born]),
        address=int(memory.address[born]),
        stream=int(program.mem_stream[born]),
        owner=Owner(int(program.owners[handle])),
        made=moment(memory, born),
        freed=moment(memory, died) if died < memory.played else None,
    )


def moment(memory: MemoryTimeline, event: int) -> Moment:
    """Where a memory event happened."""
    phase, path, operator = memory.program.where(int(memory.program.mem_where[event]))
    step = next((i for i, (first, last) in enumerate(memory.steps()) if first <= event < last), -1)
    return Moment(event, step, phase, path, operator)
