"""The tight loop of play: cached blocks found, cut, freed and merged, on integers only."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from sim.engine.allocator.expandable import prefer
from sim.engine.allocator.heap import POSITION_MASK, Heap
from sim.engine.allocator.statistics import Ints
from sim.scenario.allocator.settings import MIN_BLOCK_BYTES, SMALL_LIMIT_BYTES, UNLIMITED

if TYPE_CHECKING:
    from sim.engine.allocator.allocator import CachingAllocator

STREAM_BITS = 16
"""Request code of an allocation: bytes << STREAM_BITS | stream; 0 for a free."""

# What happened to a block: logged per event, for the statistics of split blocks.
CUT, CUT_WHOLE, TAKEN, TAKEN_WHOLE, FREED, FREED_WHOLE = 0, 1, 2, 3, 4, 7
"""FREED and FREED_WHOLE are followed by the codes for one and two merged neighbours."""
COUNT_CHANGE: Ints = np.array([0, 1, -1, 0, 1, 0, -1, 0, -1, -2])
BYTES_SIGN: Ints = np.array([-1, -1, -1, 0, 1, 1, 1, 1, 1, 1])
SEGMENT_SIGN: Ints = np.array([0, 1, 0, 0, 0, 0, 0, -1, -1, -1])

Record = tuple[int, int, int, list[int]]
"""A block handed out in the tight loop: position, position behind it, key, its pool's keys."""


Spec = tuple[int, int, list[int], int, int]
"""How to serve a request: rounded bytes; the same as a key; keys to search; smallest key of a remainder that is split
off; key from which on a block is too large for this request."""


class Specs(dict[int, Spec]):
    """Request code -> how to serve it under the allocator's settings; filled on demand."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self.allocator = allocator

    def __missing__(self, code: int) -> Spec:
        settings, shift = self.allocator.settings, self.allocator.heap.size_shift
        size = settings.round_bytes(code >> STREAM_BITS)
        small = size <= SMALL_LIMIT_BYTES
        pool = self.allocator.small if small else self.allocator.large
        least = MIN_BLOCK_BYTES
        if not (small or settings.expandable_segments):
            least = SMALL_LIMIT_BYTES + MIN_BLOCK_BYTES if size < settings.max_split_bytes else UNLIMITED
        limit = settings.max_split_bytes
        if size >= limit:
            limit = size + settings.max_non_split_rounding_bytes
        spec = (size, size << shift, pool.free[code & (1 << STREAM_BITS) - 1], least << shift, limit << shift)
        self[code] = spec
        return spec


def tight_loop(
    rows: Iterator[tuple[int, int]],
    heap: Heap,
    specs: Specs,
    records: list[Record | None],
    log: bytearray,
    starts: array[int],
    ends: array[int],
) -> int:
    """Play (handle, code) rows until one misses the cache; returns its handle, or -1 at the end of the rows.

    Appends what happened per event to `log`, position and end of each block handed out to `starts` and `ends`.
    The arithmetic is that of Heap, on keys without a block number.
    """
    at_start, at_end, segment_ends = heap.at_start, heap.at_end, heap.segment_ends
    unmapped, shift, mask = heap.unmapped_starts, heap.size_shift, POSITION_MASK
    for handle, code in rows:
        if code:
            size, want, keys, least, limit = specs[code]
            i = bisect_left(keys, want)
            if i == len(keys):
                return handle
            key = keys[i]
            position = key & mask
            end = position + (key >> shift)
            if end in unmapped:
                i = prefer(heap, keys, i, True)
                key = keys[i]
                position = key & mask
                end = position + (key >> shift)
            if key >= limit:
                return handle
            del keys[i]
            del at_start[position]
            whole = position in segment_ends and segment_ends[position] == end
            rest = key - want
            if rest >= least:
                middle = position + size
                rest += size
                at_start[middle] = rest
                at_end[end] = middle
                insort(keys, rest)
                records[handle] = (position, middle, want + position, keys)
                ends.append(middle)
                log.append(1 if whole else 0)
            else:
                del at_end[end]
                records[handle] = (position, end, key, keys)
                ends.append(end)
                log.append(3 if whole else 2)
            starts.append(position)
        else:
            position, end, key, keys = records[handle]  # type: ignore[misc]
            what = 4
            if position in at_end:
                start = at_end.pop(position)
                left = at_start[start]
                del keys[bisect_left(keys, left)]
                key += left - position
                position = start
                what = 5
            if end in at_start:
                right = at_start.pop(end)
                del keys[bisect_left(keys, right)]
                key += right - end
                end += right >> shift
                what += 1
            at_start[position] = key
            at_end[end] = position
            insort(keys, key)
            if position in segment_ends and segment_ends[position] == end:
                what += 3
            log.append(what)
    return -1
