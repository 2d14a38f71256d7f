"""What the allocator did entry by entry, as torch.cuda.memory._record_memory_history keeps it, and what is left."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.engine.allocator import AllocatorSettings, CachingAllocator
from sim.engine.allocator.layout import SegmentLayout
from sim.timeline.memory import MemoryTimeline


class Entry(NamedTuple):
    """One entry: `event` is the memory event that caused it; `address` of an "oom" is what the driver had left.

    bytes: as asked for by alloc, free_requested and free_completed; of the segment by segment_*.
    """

    event: int
    action: str
    address: int
    bytes: int
    stream: int


class History(NamedTuple):
    """Entries from `first_event` on, and the segments after the last one."""

    first_event: int
    entries: list[Entry]
    segments: list[SegmentLayout]


def record_history(
    memory: MemoryTimeline,
    settings_text: str,
    total_bytes: int,
    capacity_bytes: int,
    version: str,
    most_events: int,
) -> History:
    """Play again what `memory` shows, noting every entry of the last `most_events` events; parameters as MemoryPlay's.

    The out-of-memory that ends a timeline is the last entry.
    """
    program = memory.program
    allocator = CachingAllocator(AllocatorSettings.parse(settings_text, version), total_bytes, capacity_bytes, version)
    events = memory.played + (memory.out_of_memory is not None)
    first = max(events - most_events, 0)
    entries: list[Entry] = []

    def note(action: str, address: int, size_bytes: int, stream: int) -> None:
        if action != "flush":
            entries.append(Entry(start + allocator.playing, action, address, size_bytes, stream))

    for start, stop in ((0, first), (first, events)):
        part = slice(start, stop)
        columns = (program.mem_kind, program.mem_handle, program.mem_bytes, program.mem_stream)
        allocator.play(*(column[part].astype(np.int64) for column in columns))
        allocator.trace = note
    return History(first, entries, allocator.segments())
