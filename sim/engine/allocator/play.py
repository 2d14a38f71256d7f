"""Playing a whole column of memory events at once.

The common case (a cached block exists, nothing waits for other streams) runs in one tight loop over integers; every
other event goes through the allocator's own methods. Statistics of a stretch of common events are added up afterwards
with numpy. Both ways end in the same state.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sim.engine.allocator.blocks import Block
from sim.engine.allocator.oom import OutOfMemory
from sim.engine.allocator.statistics import Ints
from sim.engine.allocator.tight import BYTES_SIGN, COUNT_CHANGE, SEGMENT_SIGN, STREAM_BITS, Record, Specs, tight_loop
from sim.program.collector import without_collector
from sim.program.program import Mem
from sim.scenario.allocator.settings import SMALL_LIMIT_BYTES, UNLIMITED

if TYPE_CHECKING:
    from sim.engine.allocator.allocator import CachingAllocator


FREE = int(Mem.FREE)  # a plain integer, where it is compared for single events


@dataclass(frozen=True, slots=True)
class DriverCall:
    """A call that left the cache, at position `event` of the columns played.

    action: segment_alloc, segment_free, segment_map, segment_unmap, or flush (all outstanding events are waited for).
    """

    event: int
    action: str
    address: int
    size_bytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class PlayResult:
    """What the events of one call did; all arrays have one entry per event played."""

    allocated_bytes: Ints
    active_bytes: Ints
    reserved_bytes: Ints
    address: Ints
    """Of the block that the event is about."""
    block_bytes: Ints
    """Size of that block."""
    driver_calls: list[DriverCall]
    out_of_memory: OutOfMemory | None
    """Set if the event behind the last one played found no memory."""

    @property
    def played(self) -> int:
        """Events played; with out_of_memory also the position of the event that failed."""
        return len(self.address)


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The segments of a moment as arrays, in the order of positions."""

    changes: int
    origins: Ints
    bases: Ints
    """Address less position."""
    lengths: Ints

    def find(self, positions: Ints) -> Ints:
        """Row of the segment in which each position lies."""
        return np.searchsorted(self.origins, positions, "right") - 1


class Player:
    """Plays events of one allocator; knows which block each handle stands for, over all calls."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.specs = Specs(allocator)
        self.settings = allocator.settings
        self.records: list[Record | None] = []
        """Per handle; None for a handle that was never allocated by the tight loop."""
        self.blocks: dict[int, Block] = {}
        """Handles that have a Block; it may be gone already if not alive (see settle)."""
        self.position = np.zeros(0, np.int64)
        self.size = np.zeros(0, np.int64)
        self.requested = np.zeros(0, np.int64)
        self.address = np.zeros(0, np.int64)
        self.born = np.zeros(0, np.int64)
        self.died = np.zeros(0, np.int64)
        """Scratch of one call: events that allocate and free each of its handles."""
        self.alive = np.zeros(0, np.bool_)
        self.recorded = np.zeros(0, np.bool_)
        """record_stream was called on the handle."""
        self.seen = 0
        """Handles from here on were never allocated."""
        self.table = SegmentTable(-1, self.position, self.position, self.position)
        self.loose = False
        """Some live handles have no Block yet, or some blocks are gone."""

    def play(self, kind: Ints, handle: Ints, size: Ints, stream: Ints) -> PlayResult:
        """Play the columns; see CachingAllocator.play."""
        call = Call(self, kind, handle, size, stream)
        with without_collector():
            return call.run()

    @property
    def fast(self) -> bool:
        """The tight loop covers the present settings and state."""
        allocator = self.allocator
        heap, settings = allocator.heap, allocator.settings
        return not (
            allocator.pending
            or allocator.trace
            or allocator.private_pools
            or heap.numbered
            or heap.keep_ages
            or heap.ranges != (len(heap.segments) if settings.expandable_segments else 0)
        )

    def reserve(self, handles: int) -> None:
        """Room for handles 0 ... handles - 1."""
        grow = handles - len(self.records)
        if grow <= 0:
            return
        grow = max(grow, len(self.records) // 2)
        self.records += [None] * grow
        for name in ("position", "size", "requested", "address", "born", "died"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(grow, np.int64)]))
        for name in ("alive", "recorded"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(grow, np.bool_)]))

    def segment_table(self) -> SegmentTable:
        heap = self.allocator.heap
        if self.table.changes != heap.changes:
            segments = [heap.segments[origin] for origin in heap.origins]
            bases = np.array([segment.address - segment.origin for segment in segments], np.int64)
            lengths = np.array([segment.size_bytes for segment in segments], np.int64)
            self.table = SegmentTable(heap.changes, np.array(heap.origins, np.int64), bases, lengths)
        return self.table

    def block(self, handle: int) -> Block:
        """The block of a live handle."""
        block = self.blocks.get(handle)
        if block is None:
            position, size = int(self.position[handle]), int(self.size[handle])
            segment = self.allocator.heap.segment_at(position)
            requested = int(self.requested[handle])
            block = Block(segment.address_of(position), size, requested, segment.stream, segment, position)
            self.blocks[handle] = self.allocator.handed_out[position] = block
        return block

    def used_elsewhere(self) -> list[tuple[int, ...]]:
        """Position of every live block that record_stream was called on, and the streams."""
        blocks = (block for handle, block in self.blocks.items() if self.alive[handle] and block.other_streams)
        return sorted((block.position, *sorted(block.other_streams)) for block in blocks)

    def settle(self) -> None:
        """Make the allocator's table of live blocks true again after the tight loop."""
        self.loose = False
        handed_out = self.allocator.handed_out
        for handle in [handle for handle in self.blocks if not self.alive[handle]]:
            block = self.blocks.pop(handle)
            block.state = "free"
            if handed_out.get(block.position) is block:
                del handed_out[block.position]
        for handle in np.flatnonzero(self.alive & (self.size > 0)).tolist():
            self.block(handle)


class Call:
    """One call of play: columns in, PlayResult out."""

    def __init__(self, player: Player, kind: Ints, handle: Ints, size: Ints, stream: Ints) -> None:
        self.player, self.allocator = player, player.allocator
        if player.settings is not self.allocator.settings:
            player.specs, player.settings = Specs(self.allocator), self.allocator.settings
        self.kind, self.handle, self.stream = kind, handle, stream
        self.count = len(kind)
        self.first_call = self.allocator.calls
        player.reserve(int(handle.max(initial=-1)) + 1)
        self.is_alloc = kind == Mem.ALLOC
        self.check()
        born = handle[self.is_alloc]
        if len(born) and int(born.min()) < player.seen:
            player.settle()
        player.seen = max(player.seen, int(born.max(initial=-1)) + 1)
        player.requested[born] = size[self.is_alloc]
        player.recorded[born] = False
        self.void = player.requested[handle] == 0
        self.codes = np.where(self.is_alloc, size << STREAM_BITS | stream, 0)
        self.allocated = np.zeros(self.count, np.int64)
        self.active = np.zeros(self.count, np.int64)
        self.reserved = np.zeros(self.count, np.int64)
        self.driver_calls: list[DriverCall] = []
        self.out_of_memory: OutOfMemory | None = None

    def check(self) -> None:
        """Raise ValueError if a handle is allocated twice, or freed or used while it is not live."""
        player, events, handle = self.player, np.arange(self.count), self.handle
        allocs, frees = self.is_alloc, self.kind == Mem.FREE
        player.born[handle] = np.where(player.alive[handle], -1, self.count)
        player.died[handle] = self.count
        player.born[handle[allocs]] = events[allocs]
        player.died[handle[frees]] = events[frees]
        born, died = player.born[handle], player.died[handle]
        wrong = (born > events) | (died < events)
        wrong |= allocs & (player.alive[handle] | (born != events))
        wrong |= frees & (died != events)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            name = Mem(int(self.kind[at])).name
            raise ValueError(f"memory event {at}: {name} of handle {int(self.handle[at])}, which is not in that state")

    def run(self) -> PlayResult:
        player = self.player
        slow = self.kind == Mem.RECORD_STREAM
        player.recorded[self.handle[slow]] = True
        slow |= (self.kind == Mem.FREE) & player.recorded[self.handle]
        done = 0
        for stop in [*np.flatnonzero(slow & ~self.void).tolist(), self.count]:
            done = self.play_to(done, stop)
            if done < stop or stop == self.count or not self.play_one(stop):
                break
            done = stop + 1
        self.allocator.calls = self.first_call + done
        self.note_void(done)
        handles = self.handle[:done]
        return PlayResult(
            self.allocated[:done],
            self.active[:done],
            self.reserved[:done],
            player.address[handles],
            player.size[handles],
            self.driver_calls,
            self.out_of_memory,
        )

    def note_void(self, done: int) -> None:
        """Handles of 0 bytes among the first `done` events."""
        player, void = self.player, self.void[:done]
        born = self.handle[:done][void & self.is_alloc[:done]]
        player.position[born] = player.size[born] = player.address[born] = 0
        player.alive[born] = True
        player.alive[self.handle[:done][void & (self.kind[:done] == Mem.FREE)]] = False

    def play_to(self, start: int, stop: int) -> int:
        """Play events start ... stop - 1; returns where it ended (before `stop` only when out of memory)."""
        at = start
        while at < stop:
            if self.player.fast:
                at = self.play_common(at, stop)
                if self.out_of_memory or at == stop:
                    return at
            elif self.play_one(at):
                at += 1
            else:
                return at
        return at

    def play_common(self, start: int, stop: int) -> int:
        """Play events in the tight loop as long as it covers them, others that only miss the cache singly."""
        player, heap = self.player, self.allocator.heap
        events = start + np.flatnonzero(~self.void[start:stop])
        handles = self.handle[events]
        rows = zip(handles.tolist(), self.codes[events].tolist())
        at, done = start, 0
        while True:
            log, starts, ends = bytearray(), array("q"), array("q")
            missed = tight_loop(rows, heap, player.specs, player.records, log, starts, ends)
            upto = int(events[done + len(log)]) if missed >= 0 else stop
            self.add_up(at, upto, events[done : done + len(log)], log, starts, ends)
            done += len(log) + 1
            at = upto
            if missed < 0 or not self.play_one(at):
                return at
            at += 1
            if not player.fast:
                return at

    def add_up(self, start: int, stop: int, events: Ints, log: bytearray, starts: array[int], ends: array[int]) -> None:
        """Statistics, series and handles for events start ... stop - 1, of which `events` went through the loop."""
        player, allocator, statistics = self.player, self.allocator, self.allocator.statistics
        self.reserved[start:stop] = allocator.reserved_bytes
        self.allocated[start:stop] = self.active[start:stop] = allocator.allocated_bytes
        handles, codes = self.handle[events], np.frombuffer(log, np.uint8)
        if not len(events):
            return
        player.loose = True
        allocs = self.is_alloc[events]
        born = handles[allocs]
        player.position[born] = starts
        player.size[born] = np.array(ends) - np.array(starts)
        player.alive[born] = True
        player.alive[handles[~allocs]] = False
        table = player.segment_table()
        player.address[born] = player.position[born] + table.bases[table.find(np.array(starts))]
        size, sign = player.size[handles], np.where(allocs, 1, -1)
        small = size <= SMALL_LIMIT_BYTES
        change = np.zeros(stop - start, np.int64)
        change[events - start] = size * sign
        self.allocated[start:stop] += np.cumsum(change)
        self.active[start:stop] = self.allocated[start:stop]
        for gauge in (statistics.allocated_bytes, statistics.active_bytes):
            gauge.add_series(size * sign, small)
        for gauge in (statistics.allocation, statistics.active):
            gauge.add_series(sign, small)
        statistics.requested_bytes.add_series(player.requested[handles] * sign, small)
        oversize = allocator.settings.max_split_bytes
        if oversize != UNLIMITED:
            statistics.oversize_allocations.add_series(np.where(size >= oversize, sign, 0), small)
        if not allocator.settings.expandable_segments:
            segment = table.lengths[table.find(player.position[handles])]
            statistics.inactive_split.add_series(COUNT_CHANGE[codes], small)
            inactive: Ints = (BYTES_SIGN[codes] * size + SEGMENT_SIGN[codes] * segment).astype(np.int64)
            statistics.inactive_split_bytes.add_series(inactive, small)

    def play_one(self, at: int) -> bool:
        """Play one event through the allocator's methods; False when it is out of memory."""
        player, allocator, handle = self.player, self.allocator, int(self.handle[at])
        allocator.calls = self.first_call + at
        allocator.playing = at
        outer, allocator.trace = allocator.trace, self.on_trace
        self.outer = outer
        try:
            if self.is_alloc[at]:
                block = allocator.malloc(int(player.requested[handle]), int(self.stream[at]))
                self.enter(handle, block)
            elif self.void[at]:
                pass
            elif self.kind[at] == FREE:
                allocator.free(player.block(handle))
                player.alive[handle] = False
                del player.blocks[handle]
            else:
                allocator.record_stream(player.block(handle), int(self.stream[at]))
        except OutOfMemory as problem:
            self.out_of_memory = problem
            return False
        finally:
            allocator.trace = outer
        self.allocated[at] = allocator.allocated_bytes
        self.active[at] = allocator.active_bytes
        self.reserved[at] = allocator.reserved_bytes
        return True

    def enter(self, handle: int, block: Block) -> None:
        """A handle got its block through malloc."""
        player, heap = self.player, self.allocator.heap
        player.alive[handle] = True
        player.position[handle], player.address[handle] = block.position, block.address
        player.size[handle] = block.size_bytes
        if block.segment is None:
            return
        player.blocks[handle] = block
        keys = block.segment.pool.free[block.stream]
        key = heap.key(block.size_bytes, block.number, block.position)
        player.records[handle] = (block.position, block.end, key, keys)

    def on_trace(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        if action.startswith("segment") or action == "flush":
            self.driver_calls.append(DriverCall(self.allocator.playing, action, address, size_bytes, stream))
        if self.outer:
            self.outer(action, address, size_bytes, stream)
