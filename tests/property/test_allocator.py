"""Any sequence of events: the allocator equals the naive one, is consistent, and play equals single calls.

SIM_EXAMPLES sets the number of examples (default 60).
"""

from __future__ import annotations

import os
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.engine.allocator import AllocatorSettings, Block, CachingAllocator, OutOfMemory, StreamEvent
from sim.program.program import Mem
from tests.property.naive_allocator import MIB, NaiveAllocator, NaiveBlock

EXAMPLES = int(os.environ.get("SIM_EXAMPLES", "60"))
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "max_split_size_mb:64,max_non_split_rounding_mb:32",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,64:8,>:0]",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0.3,max_split_size_mb:40",
    "garbage_collection_threshold:0.5,expandable_segments:True",
)
VERSIONS = ("2.9.1", "2.12.1", "2.14.1")
TOTAL_BYTES = 512 * MIB
USUAL_BYTES = [1, 512, 1000, 64 << 10, MIB - 1, MIB, MIB + 1, 2 * MIB, 9 * MIB, 10 * MIB, 19 * MIB, 20 * MIB]
USUAL_BYTES += [24 * MIB, 30 * MIB, 40 * MIB, 63 * MIB, 64 * MIB, 96 * MIB]
sizes = st.one_of(st.sampled_from(USUAL_BYTES), st.integers(1, 4096), st.integers(1, 80 * MIB))
streams = st.integers(0, 2)
configurations = st.tuples(st.sampled_from(SETTINGS), st.sampled_from(VERSIONS))


class AllocatorMachine(RuleBasedStateMachine):
    """Plays the same events on both allocators."""

    @initialize(configuration=configurations, capacity=st.sampled_from([96, 200, 512]))
    def start(self, configuration: tuple[str, str], capacity: int) -> None:
        text, version = configuration
        chosen = AllocatorSettings.parse(text, version)
        self.finished: dict[int, int] = {}
        self.real = CachingAllocator(
            chosen,
            TOTAL_BYTES,
            capacity * MIB,
            version=version,
            event_finished=lambda event: event.number <= self.finished.get(event.stream, 0),
            on_event=self.on_event,
        )
        self.naive = NaiveAllocator(chosen, TOTAL_BYTES, capacity * MIB, version)
        self.pairs: list[tuple[Block, NaiveBlock]] = []

    def on_event(self, what: str, event: StreamEvent) -> None:
        if what != "record":
            self.finished[event.stream] = max(self.finished.get(event.stream, 0), event.number)

    @rule(size=sizes, stream=streams)
    def malloc(self, size: int, stream: int) -> None:
        expected = self.naive.malloc(size, stream)
        try:
            block = self.real.malloc(size, stream)
        except OutOfMemory as problem:
            assert expected is None
            assert problem.device_free_bytes == self.naive.driver.free_bytes
            return
        assert expected is not None
        assert (block.address, block.size_bytes) == (expected.address, expected.size)
        self.pairs.append((block, expected))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def malloc_a_size_again(self, data: Any) -> None:
        block, _ = data.draw(st.sampled_from(self.pairs))
        self.malloc(block.requested_bytes, block.stream)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        block, expected = self.pairs.pop(data.draw(st.integers(0, len(self.pairs) - 1)))
        self.real.free(block)
        self.naive.free(expected)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), stream=streams)
    def record_stream(self, data: Any, stream: int) -> None:
        block, expected = data.draw(st.sampled_from(self.pairs))
        self.real.record_stream(block, stream)
        if stream != block.stream:
            expected.users.add(stream)

    @rule(seed=st.integers(0, 1 << 32), count=st.integers(1, 40))
    def churn(self, seed: int, count: int) -> None:
        """Many requests of few sizes and frees between them."""
        random = Random(seed)
        few = random.sample(USUAL_BYTES, 3)
        for _ in range(count):
            if self.pairs and random.random() < 0.5:
                block, expected = self.pairs.pop(random.randrange(len(self.pairs)))
                self.real.free(block)
                self.naive.free(expected)
            else:
                self.malloc(random.choice(few), random.randrange(2))

    @rule(stream=streams)
    def finish(self, stream: int) -> None:
        self.naive.finish(stream)
        self.finished[stream] = self.real.pending.recorded.get(stream, 0)

    @rule()
    def empty_cache(self) -> None:
        self.real.empty_cache()
        self.naive.flush()

    @rule(capacity=st.integers(16, 512))
    def change_capacity(self, capacity: int) -> None:
        self.real.driver.capacity_bytes = self.naive.driver.capacity_bytes = capacity * MIB

    @rule(fraction=st.sampled_from([0.1, 0.25, 0.5]))
    def limit(self, fraction: float) -> None:
        self.real.set_memory_fraction(fraction)
        self.naive.limit = int(fraction * TOTAL_BYTES)

    @invariant()
    def both_are_equal(self) -> None:
        if not hasattr(self, "real"):
            return
        self.real.validate()
        names = {"allocated": "live", "pending": "pending", "free": "free"}
        blocks = [block for segment in self.real.segments() for block in segment.blocks]
        layout = [(block.address, block.size_bytes, names[block.state], block.requested_bytes) for block in blocks]
        assert layout == self.naive.layout()
        statistics = self.real.statistics
        expected = self.naive.statistics()
        assert {name: getattr(statistics, name).current[0] for name in expected} == expected
        counters = self.naive.counters()
        assert {name: getattr(statistics, name) for name in counters} == counters


AllocatorMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
TestTheAllocatorEqualsTheNaiveOne = AllocatorMachine.TestCase


def columns(seed: int, count: int) -> Any:
    """Memory events of a Program, (kind, handle, bytes, stream) per row: few sizes, frees, other streams."""
    random = Random(seed)
    few = random.sample([0, *USUAL_BYTES], random.randint(2, 6))
    shared = random.choice([0, 0.05])
    rows: list[tuple[int, int, int, int]] = []
    live: list[int] = []
    handles = 0
    for _ in range(count):
        if live and random.random() < shared:
            rows.append((Mem.RECORD_STREAM, random.choice(live), 0, 2))
        elif live and random.random() < 0.45:
            rows.append((Mem.FREE, live.pop(random.randrange(len(live))), 0, 0))
        else:
            rows.append((Mem.ALLOC, handles, random.choice(few), int(random.random() < 0.2)))
            live.append(handles)
            handles += 1
    return np.array(rows, np.int64).reshape(-1, 4).T


def one_by_one(allocator: CachingAllocator, events: Any) -> list[tuple[int, int, int, int, int]]:
    """The rows of a PlayResult from single calls, up to an out of memory."""
    blocks: dict[int, Block] = {}
    rows = []
    for kind, handle, size, stream in events.T.tolist():
        if kind == Mem.ALLOC:
            try:
                block = blocks[handle] = allocator.malloc(size, stream)
            except OutOfMemory:
                break
        elif kind == Mem.FREE:
            allocator.free(block := blocks.pop(handle))
        else:
            allocator.record_stream(block := blocks[handle], stream)
        bytes_now = (allocator.allocated_bytes, allocator.active_bytes, allocator.reserved_bytes)
        rows.append((*bytes_now, block.address, block.size_bytes))
    return rows


@settings(max_examples=3 * EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(columns, st.integers(0, 1 << 32), st.integers(0, 300)),
    configurations,
    st.sampled_from([96, 200, 512]),
    st.sampled_from([None, 0.3]),
    st.lists(st.integers(0, 300), max_size=3),
)
def test_play_equals_single_calls(
    events: Any, configuration: tuple[str, str], capacity: int, fraction: float | None, cuts: list[int]
) -> None:
    text, version = configuration
    chosen = AllocatorSettings.parse(text, version)

    def fresh() -> CachingAllocator:
        # every third event of a stream is late, so that some frees wait
        allocator = CachingAllocator(
            chosen, TOTAL_BYTES, capacity * MIB, version, event_finished=lambda event: event.number % 3 > 0
        )
        if fraction is not None:
            allocator.set_memory_fraction(fraction)
        return allocator

    single, bulk = fresh(), fresh()
    expected = one_by_one(single, events)
    got: list[tuple[int, int, int, int, int]] = []
    edges = [0, *sorted(min(cut, events.shape[1]) for cut in cuts), events.shape[1]]
    for start, stop in pairwise(edges):
        result = bulk.play(*events[:, start:stop])
        series = (
            result.allocated_bytes,
            result.active_bytes,
            result.reserved_bytes,
            result.address,
            result.block_bytes,
        )
        got += zip(*(column.tolist() for column in series))
        if result.out_of_memory:
            break
    assert got == expected
    assert bulk.statistics == single.statistics
    assert bulk.segments() == single.segments()
    bulk.validate()
