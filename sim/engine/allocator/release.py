"""Giving memory back to the driver: flush, releasing some oversize blocks, garbage collection."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from sim.engine.allocator import expandable
from sim.engine.allocator.blocks import Pool, PrivatePool
from sim.engine.allocator.heap import POSITION_MASK
from sim.scenario.allocator.settings import UNLIMITED

if TYPE_CHECKING:
    from sim.engine.allocator.allocator import CachingAllocator


def flush(allocator: CachingAllocator, only: PrivatePool | None = None) -> None:
    """Wait for outstanding events, then release every cached block without neighbours (`only`: of one private pool)."""
    allocator.statistics.num_sync_all_streams += 1
    if allocator.trace:
        allocator.trace("flush", 0, 0, 0)
    allocator.pending.wait(only)
    if only is None:
        release_pool(allocator, allocator.large)
        release_pool(allocator, allocator.small)
    for pool in list(allocator.private_pools):
        if pool.uses == 0 and only in (None, pool):
            release_pool(allocator, pool.small)
            release_pool(allocator, pool.large)
            if not any(segment.pool.owner is pool for segment in allocator.heap.segments.values()):
                allocator.private_pools.remove(pool)


def release_pool(allocator: CachingAllocator, pool: Pool) -> None:
    """Release a pool's cached blocks in search order; expandable ones last."""
    heap = allocator.heap
    to_unmap = []
    for stream in sorted(pool.free):
        for key in list(pool.free[stream]):
            if heap.segment_at(key & POSITION_MASK).expandable:
                to_unmap.append(key)
            elif heap.is_whole(key):
                release_block(allocator, key)
    for key in to_unmap:
        expandable.unmap(allocator, key)


def release_block(allocator: CachingAllocator, key: int) -> None:
    """Give back the segment that a cached block covers."""
    heap, statistics = allocator.heap, allocator.statistics
    segment = heap.segment_at(key & POSITION_MASK)
    heap.take(segment, key)
    heap.drop_segment(segment)
    allocator.driver.free(segment.address)
    pool = segment.pool.statistic
    statistics.segment.add(pool, -1)
    statistics.reserved_bytes.add(pool, -segment.size_bytes)
    if segment.size_bytes >= allocator.settings.max_split_bytes:
        statistics.oversize_segments.add(pool, -1)
    statistics.num_device_free += 1
    if allocator.trace:
        allocator.trace("segment_free", segment.address, segment.size_bytes, segment.stream)


def release_some(allocator: CachingAllocator, pool: Pool, stream: int, size: int) -> bool:
    """With a max_split_size: release the smallest oversize block that suffices, else the largest until their sum does.

    Returns whether enough was released; what was released stays so either way.
    """
    oversize = allocator.settings.max_split_bytes
    if oversize == UNLIMITED:
        return False
    heap = allocator.heap
    want = max(size, oversize)
    keys = pool.free[stream]
    fitting = bisect_left(keys, want << heap.size_shift)
    for key in keys[fitting:]:
        if not heap.segment_at(key & POSITION_MASK).expandable:
            release_block(allocator, key)
            return True
    released = 0
    for key in reversed(keys[:fitting]):
        if released >= want or heap.size_of(key) < oversize:
            break
        if not heap.segment_at(key & POSITION_MASK).expandable:
            release_block(allocator, key)
            released += heap.size_of(key)
    return released >= want


def collect_garbage(allocator: CachingAllocator) -> None:
    """Release the oldest unsplit cached blocks of the default large pool until the share of the limit is met."""
    assert allocator.limit_bytes is not None
    threshold = int(allocator.settings.gc_threshold * allocator.limit_bytes)
    target = allocator.reserved_bytes - threshold
    if target <= 0:
        return
    heap, pool = allocator.heap, allocator.large
    ages = {
        key: pool.searches - heap.ages.get(key & POSITION_MASK, 0)
        for stream in sorted(pool.free)
        for key in pool.free[stream]
        if heap.is_whole(key)
    }
    total, count, reclaimed, progress = float(sum(ages.values())), len(ages), 0, True
    while reclaimed < target and progress and count > 0:
        average = total / count
        progress = False
        for key, age in list(ages.items()):
            if age >= average and not heap.segment_at(key & POSITION_MASK).expandable:
                release_block(allocator, key)
                del ages[key]
                progress = True
                reclaimed += heap.size_of(key)
                total -= age
                count -= 1
