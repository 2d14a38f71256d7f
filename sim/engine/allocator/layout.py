"""Looking at an allocator: its segments, one block's life, and whether its state is consistent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.engine.allocator.blocks import Block, Pool, Segment, State
from sim.engine.allocator.heap import POSITION_MASK
from sim.engine.allocator.statistics import ALL, Gauge
from sim.scenario.allocator.settings import MIN_BLOCK_BYTES

if TYPE_CHECKING:
    from sim.engine.allocator.allocator import CachingAllocator


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block of a segment; requested_bytes is 0 for a free one."""

    address: int
    size_bytes: int
    state: State
    requested_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """One segment as torch.cuda.memory_snapshot lists it: of an expandable range, each stretch with memory."""

    address: int
    size_bytes: int
    stream: int
    pool: str
    expandable: bool
    blocks: tuple[BlockLayout, ...]


def segments(allocator: CachingAllocator) -> list[SegmentLayout]:
    """All segments in the order of their addresses."""
    heap = allocator.heap
    found = []
    positions = iter(sorted([*allocator.live, *heap.at_start, *heap.unmapped_starts]))
    position = next(positions, None)
    for origin in heap.origins:
        segment, end = heap.segments[origin], heap.segment_ends[origin]
        run: list[BlockLayout] = []
        while position is not None and position < end:
            if position in segment.unmapped:
                found += layout_of(segment, run)
                run = []
            else:
                run.append(block_at(allocator, segment, position))
            position = next(positions, None)
        found += layout_of(segment, run)
    return sorted(found, key=lambda item: item.address)


def layout_of(segment: Segment, run: list[BlockLayout]) -> list[SegmentLayout]:
    if not run:
        return []
    size = sum(block.size_bytes for block in run)
    label, expandable = segment.pool.label, segment.expandable
    return [SegmentLayout(run[0].address, size, segment.stream, label, expandable, tuple(run))]


def block_at(allocator: CachingAllocator, segment: Segment, position: int) -> BlockLayout:
    block = allocator.live.get(position)
    if block is not None:
        return BlockLayout(block.address, block.size_bytes, block.state, block.requested_bytes)
    size = allocator.heap.size_of(allocator.heap.at_start[position])
    return BlockLayout(segment.address_of(position), size, "free", 0)


def story(block: Block) -> str:
    """One block's life in words: what was asked, where it came from, who used it, when it was freed."""
    if block.segment is None:
        return "a request of 0 bytes: no memory was taken"
    lines = [
        f"call {block.born}: {block.requested_bytes} bytes for stream {block.stream}: {block.size_bytes} bytes at "
        f"{block.address:#x} ({block.segment.pool.label} pool), from {block.found or 'a cached block'}"
    ]
    if block.other_streams:
        lines.append(f"also used by stream {', '.join(map(str, sorted(block.other_streams)))}")
    if block.freed is not None:
        lines.append(f"call {block.freed}: freed")
    if block.state == "pending":
        lines.append(f"not reusable before {block.outstanding} more events have finished")
    elif block.completed is not None:
        lines.append(f"call {block.completed}: reusable")
    return "\n".join(lines)


def validate(allocator: CachingAllocator) -> None:
    """Raise AssertionError if the state contradicts itself."""
    check_tiling(allocator)
    check_lists(allocator)
    check_statistics(allocator)
    for position, block in allocator.live.items():
        assert block.position == position
        deferred = block in allocator.pending.deferred
        assert block.state == ("pending" if block.outstanding or deferred else "allocated")
    waiting = [block for queue in allocator.pending.queues.values() for _, block in queue]
    for block in set(waiting):
        assert block.outstanding == waiting.count(block)
        assert allocator.live[block.position] is block


def check_tiling(allocator: CachingAllocator) -> None:
    """Blocks and unmapped stretches fill each segment without gap; no two free or two unmapped ones are neighbours."""
    heap = allocator.heap
    sizes = {position: ("live", block.size_bytes) for position, block in allocator.live.items()}
    sizes.update({position: ("free", heap.size_of(key)) for position, key in heap.at_start.items()})
    sizes.update({at: ("unmapped", segment.unmapped[at][0]) for at, segment in heap.unmapped_starts.items()})
    covered = 0
    for origin, end in heap.segment_ends.items():
        position, before = origin, ""
        while position < end:
            kind, size = sizes[position]
            assert size > 0 and size % MIN_BLOCK_BYTES == 0
            assert kind == "live" or kind != before, "neighbours that should have merged"
            position, before = position + size, kind
            covered += 1
        assert position == end
    assert covered == len(sizes), "a block outside every segment"


def check_lists(allocator: CachingAllocator) -> None:
    """Every free block is in the list of its pool and stream, in order, and nowhere else."""
    heap = allocator.heap
    listed = 0
    for pool in pools(allocator):
        for stream, keys in pool.free.items():
            assert keys == sorted(keys)
            listed += len(keys)
            for key in keys:
                position = key & POSITION_MASK
                segment = heap.segment_at(position)
                assert segment.pool is pool and segment.stream == stream
                assert heap.at_start[position] == key
                assert heap.at_end[position + heap.size_of(key)] == position
    assert listed == len(heap.at_start) == len(heap.at_end)


def check_statistics(allocator: CachingAllocator) -> None:
    """Current values equal what the blocks say."""
    heap, statistics = allocator.heap, allocator.statistics
    blocks = list(allocator.live.values())
    held = [block.size_bytes for block in blocks if block.state == "allocated"]
    cut = [
        heap.size_of(key)
        for position, key in heap.at_start.items()
        if not heap.is_whole(key) and not heap.segment_at(position).expandable
    ]
    reserved = 0
    for segment in heap.segments.values():
        reserved += segment.size_bytes - sum(size for size, _ in segment.unmapped.values())
    expected: list[tuple[Gauge, int]] = [
        (statistics.allocated_bytes, sum(held)),
        (statistics.allocation, len(held)),
        (statistics.active_bytes, sum(block.size_bytes for block in blocks)),
        (statistics.active, len(blocks)),
        (statistics.requested_bytes, sum(block.requested_bytes for block in blocks)),
        (statistics.reserved_bytes, reserved),
        (statistics.segment, len(heap.segments) - heap.ranges),
        (statistics.inactive_split_bytes, sum(cut)),
        (statistics.inactive_split, len(cut)),
    ]
    for gauge, value in expected:
        assert gauge.current[ALL] == value
        assert gauge.current[ALL] == sum(gauge.current[1:])
        assert all(peak >= current for peak, current in zip(gauge.peak, gauge.current))
    assert allocator.driver.used_bytes >= reserved


def pools(allocator: CachingAllocator) -> list[Pool]:
    """All pools: default and private ones."""
    private = [pool for owner in allocator.private_pools for pool in (owner.small, owner.large)]
    return [allocator.small, allocator.large, *private]
