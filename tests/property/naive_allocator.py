"""The allocator's rules written as plainly as possible: lists of blocks, linear search, everything recomputed.

It is the specification that the real one is compared with; it knows no private pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.engine.allocator import AllocatorSettings, Driver
from sim.scenario.allocator.rules import rules_of

MIB = 1 << 20


@dataclass(eq=False)
class NaiveBlock:
    address: int
    size: int
    number: int
    state: str = "free"
    requested: int = 0
    users: set[int] = field(default_factory=set)
    events: list[tuple[int, int]] = field(default_factory=list)
    age_base: int = 0


@dataclass(eq=False)
class NaiveSegment:
    made: int
    small: bool
    stream: int
    page: int
    blocks: list[NaiveBlock]


class NaiveAllocator:
    """malloc returns a block or None when out of memory; statistics and layout are read off the blocks."""

    def __init__(self, settings: AllocatorSettings, total: int, capacity: int, version: str) -> None:
        self.settings, self.total, self.tie = settings, total, rules_of(version).tie
        self.driver = Driver(capacity)
        self.segments: list[NaiveSegment] = []
        self.queue: list[tuple[int, int, NaiveBlock]] = []
        self.recorded: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.limit: int | None = None
        self.made = self.numbers = self.searches = 0
        self.retries = self.syncs = self.device_allocs = self.device_frees = self.ooms = 0

    # looking

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def segment_of(self, block: NaiveBlock) -> NaiveSegment:
        return next(segment for segment in self.segments if block in segment.blocks)

    def reserved(self) -> int:
        return sum(b.size for segment in self.segments for b in segment.blocks if b.state != "unmapped")

    def cached(self, small: bool, stream: int | None) -> list[NaiveBlock]:
        """Free blocks of a pool in search order."""
        found = []
        for segment in self.segments:
            if segment.small == small and stream in (None, segment.stream):
                for block in segment.blocks:
                    if block.state == "free":
                        found.append((segment.stream, block.size, self.preference(segment, block), block))
        return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:-1])]

    def preference(self, segment: NaiveSegment, block: NaiveBlock) -> tuple[int, int]:
        if self.tie == "address":
            return (block.address, 0)
        if self.tie == "block_number":
            return (block.number, 0)
        return (segment.made, block.address)

    def after(self, block: NaiveBlock) -> NaiveBlock | None:
        blocks = self.segment_of(block).blocks
        index = blocks.index(block) + 1
        return blocks[index] if index < len(blocks) else None

    def reach(self, block: NaiveBlock) -> int:
        right = self.after(block)
        return block.size + (right.size if right is not None and right.state == "unmapped" else 0)

    # events of the outside

    def malloc(self, requested: int, stream: int) -> NaiveBlock | None:
        self.process()
        size = self.settings.round_bytes(requested)
        block = self.search(size, stream)
        if block is None and self.gc_on:
            self.collect()
        block = block or self.grow(size, stream)
        if block is None and self.release_some(size, stream):
            block = self.grow(size, stream)
        if block is None:
            self.flush()
            self.retries += 1
            block = self.grow(size, stream)
        if block is None:
            self.ooms += 1
            return None
        return self.hand_out(block, size, requested)

    def free(self, block: NaiveBlock) -> None:
        if not block.users:
            self.complete(block)
            return
        block.state = "pending"
        for stream in sorted(block.users):
            self.recorded[stream] = self.recorded.get(stream, 0) + 1
            self.queue.append((stream, self.recorded[stream], block))
            block.events.append((stream, self.recorded[stream]))
        block.users = set()

    def finish(self, stream: int) -> None:
        self.finished[stream] = self.recorded.get(stream, 0)

    # rules

    @property
    def gc_on(self) -> bool:
        return self.limit is not None and self.settings.gc_threshold > 0

    def process(self) -> None:
        for entry in list(self.queue):
            stream, number, block = entry
            if number <= self.finished.get(stream, 0):
                self.queue.remove(entry)
                block.events.remove((stream, number))
                if not block.events:
                    self.complete(block)

    def complete(self, block: NaiveBlock) -> None:
        block.state, block.requested = "free", 0
        self.absorb(block)

    def absorb(self, block: NaiveBlock) -> None:
        """Merge a block with neighbours of its own state; it keeps its number."""
        segment = self.segment_of(block)
        index = segment.blocks.index(block)
        if index > 0 and segment.blocks[index - 1].state == block.state:
            left = segment.blocks.pop(index - 1)
            block.address, block.size = left.address, left.size + block.size
            index -= 1
        if index + 1 < len(segment.blocks) and segment.blocks[index + 1].state == block.state:
            block.size += segment.blocks.pop(index + 1).size
        block.age_base = self.searches

    def search(self, size: int, stream: int) -> NaiveBlock | None:
        small = size <= MIB
        if self.gc_on and not small:
            self.searches += 1
        fitting = [block for block in self.cached(small, stream) if block.size >= size]
        while (
            len(fitting) > 1 and self.settings.expandable_segments and self.reach(fitting[1]) < self.reach(fitting[0])
        ):
            fitting.pop(0)
        if not fitting:
            return None
        block, oversize = fitting[0], self.settings.max_split_bytes
        if size < oversize <= block.size:
            return None
        if size >= oversize and block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        return block

    def hand_out(self, block: NaiveBlock, size: int, requested: int) -> NaiveBlock:
        segment = self.segment_of(block)
        rest = block.size - size
        if segment.small or self.settings.expandable_segments:
            split = rest >= 512
        else:
            split = size < self.settings.max_split_bytes and rest > MIB
        if split:
            given = NaiveBlock(block.address, size, self.number())
            segment.blocks.insert(segment.blocks.index(block), given)
            block.address, block.size, block.age_base = block.address + size, rest, self.searches
            block = given
        block.state, block.requested = "live", requested
        return block

    def grow(self, size: int, stream: int) -> NaiveBlock | None:
        driver_size = self.settings.driver_bytes(size)
        if self.limit is not None and self.reserved() + driver_size > self.limit:
            return None
        if self.settings.expandable_segments:
            return self.expand(size, stream)
        address = self.driver.malloc(driver_size)
        if address is None:
            return None
        self.made += 1
        self.device_allocs += 1
        block = NaiveBlock(address, driver_size, self.number())
        self.segments.append(NaiveSegment(self.made, size <= MIB, stream, 0, [block]))
        return block

    def expand(self, size: int, stream: int) -> NaiveBlock | None:
        small = size <= MIB
        block = self.run_for(size, stream, small)
        if block is None:
            page = self.settings.page_bytes(small)
            length = -(-max(self.total + self.total // 8, size) // page) * page
            self.made += 1
            block = NaiveBlock(self.driver.reserve(length), length, self.number(), "unmapped")
            self.segments.append(NaiveSegment(self.made, small, stream, page, [block]))
        if block.state == "unmapped" and not self.map(block, min(block.size, size)):
            return None
        while block.size < size:
            right = self.after(block)
            assert right is not None and right.state == "unmapped"
            if not self.map(right, min(size - block.size, right.size)):
                return None
            block = right
        return block

    def run_for(self, size: int, stream: int, small: bool) -> NaiveBlock | None:
        ranges = [s for s in self.segments if s.page and s.small == small and s.stream == stream]
        for segment in sorted(ranges, key=lambda s: s.blocks[0].address):
            for index, block in enumerate(segment.blocks):
                if block.state != "unmapped":
                    continue
                first = index - 1 if index > 0 and segment.blocks[index - 1].state == "free" else index
                length = 0
                for other in segment.blocks[first:]:
                    if other.state not in ("free", "unmapped"):
                        break
                    length += other.size
                if length >= size:
                    return segment.blocks[first]
        return None

    def map(self, block: NaiveBlock, size: int) -> bool:
        segment = self.segment_of(block)
        pages = -(-size // segment.page)
        if not self.driver.create_pages(pages, segment.page):
            return False
        rest = block.size - pages * segment.page
        if rest:
            tail = NaiveBlock(block.address + block.size - rest, rest, self.number(), "unmapped")
            segment.blocks.insert(segment.blocks.index(block) + 1, tail)
            block.size -= rest
        block.state = "free"
        self.absorb(block)
        self.device_allocs += 1
        return True

    def unmap(self, block: NaiveBlock) -> None:
        segment = self.segment_of(block)
        page, base = segment.page, segment.blocks[0].address
        first = base + -(-(block.address - base) // page) * page
        last = base + (block.address + block.size - base) // page * page
        if first >= last:
            return
        index = segment.blocks.index(block)
        if last < block.address + block.size:
            tail = block.address + block.size - last
        else:
            tail = 0
        if first > block.address:
            segment.blocks.insert(index, NaiveBlock(block.address, first - block.address, self.number()))
            index += 1
        if tail:
            segment.blocks.insert(index + 1, NaiveBlock(last, tail, self.number()))
        block.address, block.size, block.state = first, last - first, "unmapped"
        self.finish(segment.stream)
        self.driver.release_pages((last - first) // page, page)
        self.device_frees += 1
        self.absorb(block)
        if len(segment.blocks) == 1:
            self.segments.remove(segment)

    def release(self, block: NaiveBlock) -> None:
        self.segments.remove(self.segment_of(block))
        self.driver.free(block.address)
        self.device_frees += 1

    def is_whole(self, block: NaiveBlock) -> bool:
        return len(self.segment_of(block).blocks) == 1

    def flush(self) -> None:
        self.syncs += 1
        for stream, number, _ in self.queue:
            self.finished[stream] = max(self.finished.get(stream, 0), number)
        self.process()
        for small in (False, True):
            for block in self.cached(small, None):
                if not self.segment_of(block).page and self.is_whole(block):
                    self.release(block)
            for block in self.cached(small, None):
                if self.segment_of(block).page:
                    self.unmap(block)

    def release_some(self, size: int, stream: int) -> bool:
        oversize = self.settings.max_split_bytes
        want = max(size, oversize)
        cached = [b for b in self.cached(size <= MIB, stream) if b.size >= oversize and not self.segment_of(b).page]
        enough = [block for block in cached if block.size >= want]
        if enough:
            self.release(enough[0])
            return True
        released = 0
        while cached and released < want:
            released += cached[-1].size
            self.release(cached.pop())
        return released >= want

    def collect(self) -> None:
        assert self.limit is not None
        target = self.reserved() - int(self.settings.gc_threshold * self.limit)
        old = [block for block in self.cached(False, None) if self.is_whole(block)]
        freed, progress = 0, True
        while freed < target and progress and old:
            average = sum(self.searches - block.age_base for block in old) / len(old)
            progress = False
            for block in list(old):
                if self.searches - block.age_base >= average and not self.segment_of(block).page:
                    old.remove(block)
                    freed += block.size
                    self.release(block)
                    progress = True

    # what there is

    def statistics(self) -> dict[str, int]:
        blocks = [block for segment in self.segments for block in segment.blocks]
        live = [block for block in blocks if block.state == "live"]
        active = [block for block in blocks if block.state in ("live", "pending")]
        cut = [
            block
            for segment in self.segments
            if not segment.page and len(segment.blocks) > 1
            for block in segment.blocks
            if block.state == "free"
        ]
        return {
            "allocated_bytes": sum(block.size for block in live),
            "allocation": len(live),
            "active_bytes": sum(block.size for block in active),
            "active": len(active),
            "requested_bytes": sum(block.requested for block in active),
            "reserved_bytes": self.reserved(),
            "segment": sum(not segment.page for segment in self.segments),
            "inactive_split_bytes": sum(block.size for block in cut),
            "inactive_split": len(cut),
        }

    def counters(self) -> dict[str, int]:
        return {
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "num_sync_all_streams": self.syncs,
            "num_device_alloc": self.device_allocs,
            "num_device_free": self.device_frees,
        }

    def layout(self) -> list[tuple[int, int, str, int]]:
        """(address, bytes, state, requested) of every block that has memory, by address."""
        return sorted(
            (block.address, block.size, block.state, block.requested)
            for segment in self.segments
            for block in segment.blocks
            if block.state != "unmapped"
        )
