"""Expandable segments: virtual ranges that are mapped page by page as they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.engine.allocator.blocks import Pool, Segment
from sim.engine.allocator.driver import round_up
from sim.engine.allocator.heap import POSITION_MASK, Heap

if TYPE_CHECKING:
    from sim.engine.allocator.allocator import CachingAllocator


def prefer(heap: Heap, keys: list[int], i: int, enabled: bool) -> int:
    """Index of the block to use when keys[i:] are large enough and some may lie in expandable ranges.

    A block that could grow counts with what it could grow into, so that a free tail is used last. With expandable
    segments switched off, blocks in expandable ranges are passed over.
    """
    if not enabled:
        while i < len(keys) and is_expandable(heap, keys[i]):
            i += 1
        return i
    while i + 1 < len(keys) and is_expandable(heap, keys[i]) and heap.reach(keys[i + 1]) < heap.reach(keys[i]):
        i += 1
    return i


def is_expandable(heap: Heap, key: int) -> bool:
    return heap.segment_at(key & POSITION_MASK).expandable


def grow(allocator: CachingAllocator, pool: Pool, stream: int, size: int) -> int | None:
    """Map pages until a block of at least `size` bytes exists; its key (in no list), or None if a page is refused."""
    heap = allocator.heap
    segment, position = candidate(allocator, pool, stream, size)
    if position in segment.unmapped:
        length = segment.unmapped[position][0]
        if not map_pages(allocator, segment, position, min(length, size)):
            return None
    key = heap.at_start[position]
    while heap.size_of(key) < size:
        end = position + heap.size_of(key)
        missing = min(size - heap.size_of(key), segment.unmapped[end][0])
        if not map_pages(allocator, segment, end, missing):
            return None
        key = heap.at_start[position]
    heap.take(segment, key)
    return key


def candidate(allocator: CachingAllocator, pool: Pool, stream: int, size: int) -> tuple[Segment, int]:
    """Lowest run of free and unmapped neighbours that holds `size` bytes: segment and first position.

    A run starts at the free left neighbour of an unmapped stretch. Without any, a new range is reserved.
    """
    heap = allocator.heap
    for segment in pool.ranges[stream]:
        for unmapped in sorted(segment.unmapped):
            start = heap.at_end.get(unmapped, unmapped)
            if run_length(heap, segment, start, size) >= size:
                return segment, start
    page = allocator.settings.page_bytes(pool.small)
    total = allocator.total_bytes
    length = round_up(max(total + total // 8, size), page)  # larger than the device only without a limit to it
    segment = heap.add_segment(pool, stream, allocator.driver.reserve(length), length, page)
    heap.put_unmapped(segment, segment.origin, length, heap.next_number())
    return segment, segment.origin


def run_length(heap: Heap, segment: Segment, start: int, size: int) -> int:
    """Bytes of free and unmapped neighbours from a position on, counted until `size` is reached."""
    end = start
    while end - start < size:
        if end in segment.unmapped:
            end += segment.unmapped[end][0]
        elif end in heap.at_start:
            end += heap.size_of(heap.at_start[end])
        else:
            break
    return end - start


def map_pages(allocator: CachingAllocator, segment: Segment, position: int, size: int) -> bool:
    """Back the start of an unmapped stretch with memory: a cached block, merged with its neighbours."""
    page = segment.page_bytes
    mapped = round_up(size, page)
    if not allocator.driver.create_pages(mapped // page, page):
        return False
    heap, statistics = allocator.heap, allocator.statistics
    length, number = heap.take_unmapped(segment, position)
    if mapped < length:
        heap.put_unmapped(segment, position + mapped, length - mapped, heap.next_number())
    heap.put_merged(segment, position, mapped, number)
    statistics.reserved_bytes.add(segment.pool.statistic, mapped)
    statistics.num_device_alloc += 1
    if allocator.trace:
        allocator.trace("segment_map", segment.address_of(position), mapped, segment.stream)
    return True


def unmap(allocator: CachingAllocator, key: int) -> None:
    """Give back the whole pages inside a cached block; a range left without memory is dropped."""
    heap, statistics = allocator.heap, allocator.statistics
    position = key & POSITION_MASK
    segment = heap.segment_at(position)
    page, end = segment.page_bytes, position + heap.size_of(key)
    first = segment.origin + round_up(position - segment.origin, page)
    last = segment.origin + (end - segment.origin) // page * page
    if first >= last:
        return
    allocator.pending.wait_stream(segment.stream)
    heap.take(segment, key)
    if first > position:
        heap.put(segment, position, first - position, heap.next_number())
    if last < end:
        heap.put(segment, last, end - last, heap.next_number())
    heap.put_unmapped(segment, first, last - first, heap.number_of(key))
    allocator.driver.release_pages((last - first) // page, page)
    statistics.reserved_bytes.add(segment.pool.statistic, first - last)
    statistics.num_device_free += 1
    if allocator.trace:
        allocator.trace("segment_unmap", segment.address_of(first), last - first, segment.stream)
    if segment.unmapped.get(segment.origin, (0, 0))[0] == segment.size_bytes:
        heap.take_unmapped(segment, segment.origin)
        heap.drop_segment(segment)
