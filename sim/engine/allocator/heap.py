"""Free memory: which cached blocks exist, in which order they are searched, who is whose neighbour.

A free block is one integer, its **key**: size, number and position packed so that keys sort in search order (size,
then tie). The number is the block's creation number under the "block_number" tie and 0 otherwise. A **position** is
an address spread so that two segments never touch: a block's neighbours are then found by position alone and cannot
belong to another segment. Under "segment_age" segments get rising positions as they are made, so that position order
is age order; under "address" a segment at address a starts at 2a, which keeps the order and leaves a gap behind each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from sim.engine.allocator.blocks import Pool, Segment
from sim.scenario.allocator.rules import Tie

POSITION_BITS = 56
NUMBER_BITS = 40
POSITION_MASK = (1 << POSITION_BITS) - 1
NUMBER_MASK = (1 << NUMBER_BITS) - 1
GAP_BYTES = 2 << 20


class Heap:
    """Segments, cached blocks and unmapped stretches of all pools of a device."""

    def __init__(self, tie: Tie) -> None:
        self.tie = tie
        self.numbered = tie == "block_number"
        self.size_shift = POSITION_BITS + (NUMBER_BITS if self.numbered else 0)
        self.at_start: dict[int, int] = {}
        """First position of each cached block -> key."""
        self.at_end: dict[int, int] = {}
        """Position behind each cached block -> first position."""
        self.unmapped_starts: dict[int, Segment] = {}
        self.unmapped_ends: dict[int, int] = {}
        """Position behind each unmapped stretch -> its first position."""
        self.segments: dict[int, Segment] = {}
        """By origin."""
        self.segment_ends: dict[int, int] = {}
        """Origin -> position behind the segment."""
        self.origins: list[int] = []
        self.ages: dict[int, int] = {}
        """First position of a cached block -> its pool's search counter when it was cached (garbage collection)."""
        self.keep_ages = False
        self.ranges = 0
        """How many segments are expandable."""
        self.changes = 0
        """How often segments came or went."""
        self._next_origin = 0
        self._numbers = 0

    # segments

    def add_segment(self, pool: Pool, stream: int, address: int, size_bytes: int, page_bytes: int = 0) -> Segment:
        """Enter a segment that has no blocks yet."""
        if self.tie == "address":
            origin = 2 * address
        else:
            origin = self._next_origin
            self._next_origin += size_bytes + GAP_BYTES
        segment = Segment(origin, address, size_bytes, pool, stream, page_bytes)
        self.segments[origin] = segment
        self.segment_ends[origin] = origin + size_bytes
        insort(self.origins, origin)
        self.changes += 1
        if page_bytes:
            self.ranges += 1
            insort(pool.ranges[stream], segment, key=lambda other: other.address)
        return segment

    def drop_segment(self, segment: Segment) -> None:
        """Forget a segment whose blocks have all been taken."""
        del self.segments[segment.origin]
        del self.segment_ends[segment.origin]
        self.changes += 1
        del self.origins[bisect_left(self.origins, segment.origin)]
        if segment.expandable:
            self.ranges -= 1
            segment.pool.ranges[segment.stream].remove(segment)

    def segment_at(self, position: int) -> Segment:
        return self.segments[self.origins[bisect_right(self.origins, position) - 1]]

    # keys

    def key(self, size_bytes: int, number: int, position: int) -> int:
        return size_bytes << self.size_shift | number << POSITION_BITS | position

    def size_of(self, key: int) -> int:
        return key >> self.size_shift

    def number_of(self, key: int) -> int:
        return (key >> POSITION_BITS) & NUMBER_MASK if self.numbered else 0

    def next_number(self) -> int:
        """Number of a new block object; 0 where numbers do not matter."""
        if self.numbered:
            self._numbers += 1
        return self._numbers

    def is_whole(self, key: int) -> bool:
        """The block has no neighbours: it covers its segment."""
        position = key & POSITION_MASK
        return self.segment_ends.get(position) == position + self.size_of(key)

    # cached blocks

    def put(self, segment: Segment, position: int, size_bytes: int, number: int) -> int:
        """Cache a block; returns its key."""
        key = self.key(size_bytes, number, position)
        self.at_start[position] = key
        self.at_end[position + size_bytes] = position
        insort(segment.pool.free[segment.stream], key)
        if self.keep_ages:
            self.ages[position] = segment.pool.searches
        return key

    def take(self, segment: Segment, key: int) -> None:
        """Remove a block from the cache."""
        position = key & POSITION_MASK
        del self.at_start[position]
        del self.at_end[position + self.size_of(key)]
        keys = segment.pool.free[segment.stream]
        del keys[bisect_left(keys, key)]
        self.ages.pop(position, None)

    def put_merged(self, segment: Segment, position: int, size_bytes: int, number: int) -> tuple[int, list[int]]:
        """Cache a block merged with its cached neighbours; returns its key and the sizes of the absorbed ones."""
        absorbed = []
        end = position + size_bytes
        if position in self.at_end:
            left = self.at_start[self.at_end[position]]
            self.take(segment, left)
            absorbed.append(self.size_of(left))
            position = left & POSITION_MASK
        right = self.at_start.get(end)
        if right is not None:
            self.take(segment, right)
            absorbed.append(self.size_of(right))
            end += self.size_of(right)
        return self.put(segment, position, end - position, number), absorbed

    # stretches without memory

    def put_unmapped(self, segment: Segment, position: int, size_bytes: int, number: int) -> None:
        """Enter a stretch without memory, merged with its unmapped neighbours."""
        end = position + size_bytes
        if position in self.unmapped_ends:
            start = self.unmapped_ends[position]
            self.take_unmapped(segment, start)
            position = start
        if end in segment.unmapped:
            end += self.take_unmapped(segment, end)[0]
        segment.unmapped[position] = (end - position, number)
        self.unmapped_starts[position] = segment
        self.unmapped_ends[end] = position

    def take_unmapped(self, segment: Segment, position: int) -> tuple[int, int]:
        """Remove an unmapped stretch; returns its (bytes, number)."""
        size_bytes, number = segment.unmapped.pop(position)
        del self.unmapped_starts[position]
        del self.unmapped_ends[position + size_bytes]
        return size_bytes, number

    def reach(self, key: int) -> int:
        """Bytes of a cached block together with an unmapped right neighbour that it could grow into."""
        size_bytes = self.size_of(key)
        end = (key & POSITION_MASK) + size_bytes
        beyond = self.unmapped_starts.get(end)
        return size_bytes if beyond is None else size_bytes + beyond.unmapped[end][0]
