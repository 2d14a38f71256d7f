"""What the allocator did entry by entry, as torch.cuda.memory._record_memory_history keeps it, and what is left."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from sim.engine.allocator import AllocatorSettings, CachingAllocator
from sim.engine.allocator.layout import SegmentLayout
from sim.engine.allocator.statistics import Ints
from sim.program.program import Mem
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
    narrow = (program.mem_kind, program.mem_handle, program.mem_bytes, program.mem_stream)
    columns = Columns(*(column.astype(np.int64) for column in narrow))
    plain = memory.out_of_memory is None and not (columns.kind[:events] == Mem.RECORD_STREAM).any()
    entries = _in_one_go(allocator, columns, first, events) if plain else _noted(allocator, columns, first, events)
    return History(first, entries, allocator.segments())


class Columns(NamedTuple):
    """Memory events of a program."""

    kind: Ints
    handle: Ints
    bytes: Ints
    stream: Ints

    def part(self, start: int, stop: int) -> tuple[Ints, Ints, Ints, Ints]:
        part = slice(start, stop)
        return self.kind[part], self.handle[part], self.bytes[part], self.stream[part]


def _noted(allocator: CachingAllocator, columns: Columns, first: int, events: int) -> list[Entry]:
    """What the allocator itself reports, one event after another."""
    entries: list[Entry] = []

    def note(action: str, address: int, size_bytes: int, stream: int) -> None:
        if action != "flush":
            entries.append(Entry(start + allocator.playing, action, address, size_bytes, stream))

    for start, stop in ((0, first), (first, events)):
        allocator.play(*columns.part(start, stop))
        allocator.trace = note
    return entries


def _in_one_go(allocator: CachingAllocator, columns: Columns, first: int, events: int) -> list[Entry]:
    """The same where no free waits for a stream: each event is its own entries, after the driver's calls for it."""
    played = allocator.play(*columns.part(0, events))
    calls: dict[int, list[Entry]] = defaultdict(list)
    for call in played.driver_calls:
        if call.action != "flush" and call.event >= first:
            calls[call.event].append(Entry(call.event, call.action, call.address, call.size_bytes, call.stream))
    handle, kind = columns.handle[:events], columns.kind[:events]
    asked, on_stream = np.zeros((2, int(handle.max(initial=-1)) + 1), np.int64)
    born = kind == Mem.ALLOC
    asked[handle[born]], on_stream[handle[born]] = columns.bytes[:events][born], columns.stream[:events][born]
    rows = (born, played.address, asked[handle], on_stream[handle])
    entries: list[Entry] = []
    for event, (is_alloc, address, size, stream) in enumerate(zip(*(r[first:].tolist() for r in rows)), first):
        entries += calls.get(event, ())
        if not size:
            continue
        if is_alloc:
            entries.append(Entry(event, "alloc", address, size, stream))
        else:
            entries.append(Entry(event, "free_requested", address, size, stream))
            entries.append(Entry(event, "free_completed", address, size, stream))
    return entries
