"""PyTorch's CUDA caching allocator for one device, as a state machine without a clock.

Rules and their source: recordings of PyTorch 2.9.1, 2.12.1, 2.13.0 and 2.14.1, reproduced event by event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from sim.engine.allocator import expandable, layout, release
from sim.engine.allocator.blocks import Block, Pool, PrivatePool, StreamEvent
from sim.engine.allocator.driver import Driver
from sim.engine.allocator.heap import POSITION_MASK, Heap
from sim.engine.allocator.layout import SegmentLayout
from sim.engine.allocator.oom import OutOfMemory
from sim.engine.allocator.pending import PendingFrees
from sim.engine.allocator.play import Player, PlayResult
from sim.engine.allocator.statistics import ALL, Ints, Statistics
from sim.scenario.allocator.rules import rules_of
from sim.scenario.allocator.settings import (
    MIN_BLOCK_BYTES,
    SMALL_LIMIT_BYTES,
    AllocatorSettings,
)

Trace = Callable[[str, int, int, int], None]
"""Called as trace(action, address, bytes, stream) with PyTorch's action names and "flush"; for "oom" the address is the
driver's free bytes."""

REMAINDER_LIMIT_BYTES = 1 << 20
"""A block of the large pool is split only if more than this would be left over."""


class CachingAllocator:
    """Blocks of one device: malloc and free as tensors do, empty_cache, private pools, statistics.

    total_bytes: the device's memory (memory fraction, virtual ranges); capacity_bytes: how much of it the driver has
    to give to this process. event_finished is asked whether the GPU has passed an event; on_event is told when the
    allocator records one ("record"), waits for one ("wait") or for a whole stream ("wait_stream").
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        total_bytes: int,
        capacity_bytes: int | None = None,
        version: str = "2.14",
        driver: Driver | None = None,
        event_finished: Callable[[StreamEvent], bool] | None = None,
        on_event: Callable[[str, StreamEvent], None] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.settings = settings
        self.rules = rules_of(version)
        self.total_bytes = total_bytes
        self.driver = driver or Driver(total_bytes if capacity_bytes is None else capacity_bytes)
        self.trace = trace
        self.heap = Heap(self.rules.tie)
        self.statistics = Statistics()
        self.small = Pool(small=True)
        self.large = Pool(small=False)
        self.private_pools: list[PrivatePool] = []
        """Pools in use, and deleted ones that still own segments."""
        self.active_pools: list[PrivatePool] = []
        """use_mem_pool contexts that are open, innermost last."""
        self.handed_out: dict[int, Block] = {}
        """By position; `live` is the table to read."""
        self.pending = PendingFrees(self, event_finished, on_event)
        self.limit_bytes: int | None = None
        self.calls = 0
        """Calls of malloc, free and record_stream so far."""
        self.playing = 0
        """Position in the columns of `play` of the event being played, for event_finished, on_event and trace."""
        self.player = Player(self)
        if settings.memory_fraction is not None:
            self.set_memory_fraction(settings.memory_fraction)

    # settings

    def change_settings(self, settings: AllocatorSettings) -> None:
        """Use other settings from now on; what is cached stays as it is."""
        self.settings = settings
        self._note_garbage_collection()

    def set_memory_fraction(self, fraction: float) -> None:
        """torch.cuda.set_per_process_memory_fraction: at most this share of total_bytes is obtained."""
        if fraction < 1 or self.rules.full_fraction_is_a_limit:
            self.limit_bytes = int(fraction * self.total_bytes)
        else:
            self.limit_bytes = None
        self._note_garbage_collection()

    @property
    def collects_garbage(self) -> bool:
        return self.limit_bytes is not None and self.settings.gc_threshold > 0

    def _note_garbage_collection(self) -> None:
        if self.collects_garbage:
            self.heap.keep_ages = True

    # private pools

    @property
    def may_wait(self) -> bool:
        """Events may be asked and waited for; before 2.13 an open use_mem_pool forbids it, like a graph capture."""
        return not self.active_pools or self.rules.private_pools_wait

    def create_pool(self, use_on_oom: bool = False, no_split: bool = False) -> PrivatePool:
        """A torch.cuda.MemPool."""
        pool = PrivatePool(len(self.private_pools) + 1, use_on_oom, no_split)
        if self.private_pools:
            pool.number = self.private_pools[-1].number + 1
        self.private_pools.append(pool)
        return pool

    def enter_pool(self, pool: PrivatePool) -> None:
        """Requests go to this pool until leave_pool (torch.cuda.use_mem_pool)."""
        pool.uses += 1
        self.active_pools.append(pool)

    def leave_pool(self) -> None:
        """Close the innermost use of a private pool."""
        self._release_pool(self.active_pools.pop())

    def delete_pool(self, pool: PrivatePool) -> None:
        """Drop a MemPool: its cached segments go back now, those with live blocks at a later flush."""
        self._release_pool(pool)

    def _release_pool(self, pool: PrivatePool) -> None:
        pool.uses -= 1
        if pool.uses == 0:
            release.flush(self, only=pool)

    # malloc

    def malloc(self, requested_bytes: int, stream: int = 0) -> Block:
        """Memory for a request of a stream. Raises OutOfMemory."""
        self.calls += 1
        if requested_bytes == 0:
            return Block(0, 0, 0, stream, born=self.calls)
        if self.pending and self.may_wait:
            self.pending.process()
        size = self.settings.round_bytes(requested_bytes)
        owner = self.active_pools[-1] if self.active_pools else self
        pool = owner.small if size <= SMALL_LIMIT_BYTES else owner.large
        found = "a cached block"
        key = self._search(pool, stream, size)
        if key is None:
            key, found = self._find_memory(pool, stream, size)
        if key is None:
            raise self._out_of_memory(requested_bytes, size, stream)
        return self._hand_out(key, size, requested_bytes, found)

    def _search(self, pool: Pool, stream: int, size: int) -> int | None:
        """Best fit: take the smallest cached block of the pool and stream that holds `size`, unless it is vetoed."""
        if self.collects_garbage:
            pool.searches += 1
        heap = self.heap
        keys = pool.free[stream]
        i = bisect_left(keys, size << heap.size_shift)
        if heap.ranges:
            i = expandable.prefer(heap, keys, i, self.settings.expandable_segments)
        if i == len(keys):
            return None
        key = keys[i]
        oversize = self.settings.max_split_bytes
        if size < oversize:
            if heap.size_of(key) >= oversize:
                return None
        elif heap.size_of(key) >= size + self.settings.max_non_split_rounding_bytes:
            return None
        heap.take(heap.segment_at(key & POSITION_MASK), key)
        return key

    def _find_memory(self, pool: Pool, stream: int, size: int) -> tuple[int | None, str]:
        """After a failed search: collect garbage, grow, borrow, release some, flush; stops at the first success."""
        if self.collects_garbage:
            release.collect_garbage(self)
        grown = "a new segment"
        key = self._grow(pool, stream, size)
        if key is not None:
            return key, grown
        if pool.owner is None:
            for other in self.private_pools:
                if other.use_on_oom:
                    key = self._search(other.small if pool.small else other.large, stream, size)
                    if key is not None:
                        return key, f"private pool {other.number}, since the driver refused"
        if release.release_some(self, pool, stream, size):
            key = self._grow(pool, stream, size)
            if key is not None:
                return key, grown + " after releasing oversize blocks"
        if self.may_wait:
            release.flush(self)
            self.statistics.num_alloc_retries += 1
            key = self._grow(pool, stream, size)
        return key, grown + " after flushing the cache"

    def _grow(self, pool: Pool, stream: int, size: int) -> int | None:
        """Memory from the driver: key of a block that is in no list, or None if it is refused."""
        size_bytes = self.settings.driver_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + size_bytes > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return expandable.grow(self, pool, stream, size)
        address = self.driver.malloc(size_bytes)
        if address is None:
            return None
        segment = self.heap.add_segment(pool, stream, address, size_bytes)
        statistics = self.statistics
        statistics.segment.add(pool.statistic, 1)
        statistics.reserved_bytes.add(pool.statistic, size_bytes)
        if size_bytes >= self.settings.max_split_bytes:
            statistics.oversize_segments.add(pool.statistic, 1)
        statistics.num_device_alloc += 1
        if self.trace:
            self.trace("segment_alloc", address, size_bytes, stream)
        return self.heap.key(size_bytes, self.heap.next_number(), segment.origin)

    def _hand_out(self, key: int, size: int, requested_bytes: int, found: str) -> Block:
        """Give the low part of a block that is in no list; what is left over is cached."""
        heap, statistics = self.heap, self.statistics
        position = key & POSITION_MASK
        segment = heap.segment_at(position)
        pool = segment.pool
        found_size, number = heap.size_of(key), heap.number_of(key)
        whole = heap.is_whole(key)
        rest = found_size - size
        if self._splits(pool, size, rest):
            heap.put(segment, position + size, rest, number)
            number = heap.next_number()
            if not segment.expandable:
                statistics.inactive_split_bytes.add(pool.statistic, rest if whole else -size)
                statistics.inactive_split.add(pool.statistic, int(whole))
        else:
            size = found_size
            if not (whole or segment.expandable):
                statistics.inactive_split_bytes.add(pool.statistic, -size)
                statistics.inactive_split.add(pool.statistic, -1)
        block = Block(segment.address_of(position), size, requested_bytes, segment.stream, segment, position, number)
        block.found, block.born = f"{found} of {found_size} bytes", self.calls
        self.handed_out[position] = block
        self._count_hand_out(block, pool)
        if self.trace:
            self.trace("alloc", block.address, requested_bytes, block.stream)
        return block

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.no_split:
            return False
        if pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        return size < self.settings.max_split_bytes and rest > REMAINDER_LIMIT_BYTES

    def _count_hand_out(self, block: Block, pool: Pool) -> None:
        statistics = self.statistics
        statistics.allocation.add(pool.statistic, 1)
        statistics.active.add(pool.statistic, 1)
        statistics.allocated_bytes.add(pool.statistic, block.size_bytes)
        statistics.active_bytes.add(pool.statistic, block.size_bytes)
        statistics.requested_bytes.add(pool.statistic, block.requested_bytes)
        if block.size_bytes >= self.settings.max_split_bytes:
            statistics.oversize_allocations.add(pool.statistic, 1)

    def _out_of_memory(self, requested_bytes: int, size: int, stream: int) -> OutOfMemory:
        self.statistics.num_ooms += 1
        free_bytes = self.driver.free_bytes
        if self.trace:
            self.trace("oom", free_bytes, size, stream)
        return OutOfMemory(
            requested_bytes=requested_bytes,
            rounded_bytes=size,
            driver_bytes=self.settings.driver_bytes(size),
            device_free_bytes=free_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            stream=stream,
        )

    # free

    def free(self, block: Block) -> None:
        """The tensor is gone. Its memory is free at once, or when the streams that used it have passed this point."""
        self.calls += 1
        if block.segment is None:
            return
        if block.state != "allocated" or self.handed_out.get(block.position) is not block:
            raise ValueError(f"block at {block.address:#x} is {block.state}: it cannot be freed again")
        pool = block.segment.pool
        block.freed = self.calls
        self.statistics.allocation.add(pool.statistic, -1)
        self.statistics.allocated_bytes.add(pool.statistic, -block.size_bytes)
        if block.size_bytes >= self.settings.max_split_bytes:
            self.statistics.oversize_allocations.add(pool.statistic, -1)
        if self.trace:
            self.trace("free_requested", block.address, block.requested_bytes, block.stream)
        if block.other_streams:
            self.pending.add(block)
        else:
            self.complete_free(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Another stream uses the block: its free waits for what that stream has queued by then."""
        self.calls += 1
        if block.segment is not None and stream != block.stream:
            block.other_streams.add(stream)

    def complete_free(self, block: Block) -> None:
        """Nobody uses the block any more: cache it, merged with its free neighbours."""
        segment = block.segment
        assert segment is not None
        statistics, pool = self.statistics, segment.pool
        del self.handed_out[block.position]
        block.state, block.completed = "free", self.calls
        key, absorbed = self.heap.put_merged(segment, block.position, block.size_bytes, block.number)
        if not segment.expandable:
            for size in absorbed:
                statistics.inactive_split.add(pool.statistic, -1)
                statistics.inactive_split_bytes.add(pool.statistic, -size)
            if not self.heap.is_whole(key):
                statistics.inactive_split.add(pool.statistic, 1)
                statistics.inactive_split_bytes.add(pool.statistic, self.heap.size_of(key))
        statistics.active.add(pool.statistic, -1)
        statistics.active_bytes.add(pool.statistic, -block.size_bytes)
        statistics.requested_bytes.add(pool.statistic, -block.requested_bytes)
        if self.trace:
            self.trace("free_completed", block.address, block.requested_bytes, block.stream)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache: every cached segment without a live block goes back to the driver."""
        release.flush(self)

    def play(self, kind: Ints, handle: Ints, size_bytes: Ints, stream: Ints) -> PlayResult:
        """Play columns of memory events as a Program has them; equal to calling malloc, free and record_stream.

        Handles keep their meaning over calls; one that was freed may be allocated again in a later call. Stops at an
        event that finds no memory. Raises ValueError, before anything is played, for a handle that is allocated
        twice or used while it is not live.
        """
        return self.player.play(kind, handle, size_bytes, stream)

    # what there is

    @property
    def live(self) -> dict[int, Block]:
        """Blocks handed out and not free again, by position."""
        if self.player.loose:
            self.player.settle()
        return self.handed_out

    @property
    def allocated_bytes(self) -> int:
        return self.statistics.allocated_bytes.current[ALL]

    @property
    def active_bytes(self) -> int:
        return self.statistics.active_bytes.current[ALL]

    @property
    def reserved_bytes(self) -> int:
        return self.statistics.reserved_bytes.current[ALL]

    def segments(self) -> list[SegmentLayout]:
        """Every segment with its blocks, in the order of addresses, as torch.cuda.memory_snapshot lists them."""
        return layout.segments(self)

    def story(self, block: Block) -> str:
        """One block's life in words."""
        return layout.story(block)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself; for tests, slow."""
        layout.validate(self)
