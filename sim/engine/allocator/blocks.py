"""The nouns of the caching allocator: block, segment, pool, private pool, event of a stream."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from sim.engine.allocator.statistics import LARGE, SMALL

State = Literal["allocated", "pending", "free"]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event recorded on a stream; `number` counts the allocator's events of that stream from 1."""

    stream: int
    number: int


@dataclass(slots=True, eq=False)
class PrivatePool:
    """A torch.cuda.MemPool: its own small and large pool beside the default ones."""

    number: int
    """1, 2, ... in the order of creation."""
    use_on_oom: bool
    no_split: bool
    small: Pool = field(init=False)
    large: Pool = field(init=False)
    uses: int = 1
    """The MemPool object itself and every use_mem_pool in progress."""

    def __post_init__(self) -> None:
        self.small = Pool(small=True, owner=self)
        self.large = Pool(small=False, owner=self)


@dataclass(slots=True, eq=False)
class Pool:
    """Cached blocks of one kind: per stream a list of keys (see Heap) in the order in which they are searched."""

    small: bool
    owner: PrivatePool | None = None
    free: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ranges: defaultdict[int, list[Segment]] = field(default_factory=lambda: defaultdict(list))
    """Expandable segments of each stream, by address."""
    searches: int = 0
    """Searches so far, counted only while garbage collection is on."""
    statistic: int = field(init=False)

    def __post_init__(self) -> None:
        self.statistic = SMALL if self.small else LARGE

    @property
    def no_split(self) -> bool:
        return self.owner is not None and self.owner.no_split

    @property
    def label(self) -> str:
        """ "small", "large", or for private pool k "small@k", "large@k"."""
        kind = "small" if self.small else "large"
        return kind if self.owner is None else f"{kind}@{self.owner.number}"


@dataclass(slots=True, eq=False)
class Segment:
    """One cudaMalloc, or one expandable virtual range.

    `origin` is the position of its first byte. Positions are addresses spread so that segments never touch, in the
    order in which equally large blocks are preferred (see Heap).
    """

    origin: int
    address: int
    size_bytes: int
    pool: Pool
    stream: int
    page_bytes: int = 0
    """Bytes of a physical page; 0: not expandable."""
    unmapped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Expandable: position -> (bytes, number) of each stretch without memory."""

    @property
    def expandable(self) -> bool:
        return self.page_bytes > 0

    def address_of(self, position: int) -> int:
        return self.address + position - self.origin


@dataclass(slots=True, eq=False)
class Block:
    """Memory handed out for one request; a request of 0 bytes gets a block of 0 bytes at address 0."""

    address: int
    size_bytes: int
    requested_bytes: int
    stream: int
    segment: Segment | None = None
    position: int = 0
    number: int = 0
    state: State = "allocated"
    other_streams: set[int] = field(default_factory=set)
    """Streams given to record_stream."""
    outstanding: int = 0
    """Events that must finish before the block is free again."""
    found: str = ""
    """Where the memory came from, in words."""
    born: int = 0
    """Number of the call (malloc, free, record_stream) that made it."""
    freed: int | None = None
    completed: int | None = None

    @property
    def end(self) -> int:
        return self.position + self.size_bytes
