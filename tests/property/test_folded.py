"""A world played without most of its equal periods gives the times of the whole one, whatever its ranks do in a period."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sim.api import play_whole
from sim.engine.folded import play_folded
from sim.program.kernels import Collective, Transfer
from sim.program.periods import Stretch
from sim.program.program import (
    ALL_REDUCE,
    COMPUTE,
    RECEIVE_NEXT,
    RECEIVE_PREVIOUS,
    SEND_NEXT,
    SEND_PREVIOUS,
    Program,
    Row,
)
from sim.runtime.driver_calls import HostCall
from sim.runtime.recorder import Position, Recorder
from sim.scenario import load_text
from sim.scenario.setup import Setup
from sim.timeline.lanes import Lanes

EXAMPLES = int(os.environ.get("SIM_EXAMPLES", "60"))
SCENARIO = """
model: {preset: gpt-tiny, implementation: nanogpt, layers: 4}
cluster: {gpu: a100, gpus_per_node: 8, nodes: 1}
batch: {micro_batch: 1, seq_len: 64, accumulation: 8}
parallel: {pipeline: {degree: 4}, fsdp: {degree: 2}}
"""
OTHER = (ALL_REDUCE, 3)  # streams beside compute


class Work(NamedTuple):
    """What a rank does for a micro-batch, forward or backward."""

    what: str
    stream: int
    count: int
    duration_ns: int
    back: int
    """An event so many micro-batches old is waited for."""


@st.composite
def works(draw: st.DrawFn, syncs: bool) -> list[Work]:
    kinds = ["launch"] * 3 + ["collective", "wait", "host"] + ["sync"] * syncs
    work = st.builds(
        Work,
        st.sampled_from(kinds),
        st.sampled_from((COMPUTE, COMPUTE, *OTHER)),
        st.sampled_from((1, 3, 40, 200)),
        st.sampled_from((0, 700, 3_000, 20_000)),
        st.integers(0, 3),
    )
    return draw(st.lists(work, min_size=1, max_size=4))


class Rank:
    """Records 1F1B, for micro-batches that may be of many kinds in turn (`parts`), the last one with more to do."""

    def __init__(
        self, rank: int, ranks: int, micro_batches: int, forward: list[list[Work]], backward: list[list[Work]]
    ):
        self.recorder = Recorder()
        self.rank, self.ranks, self.micro_batches = rank, ranks, micro_batches
        self.parts = forward, backward
        self.events: list[int] = []
        self.bytes = 1 << 16

    def step(self) -> Stretch:
        warm, ahead, kinds = self.ranks - 1 - self.rank, 4, len(self.parts[0])
        for micro_batch in range(warm):
            self._pass(micro_batch, back=False)
        positions: list[Position] = []
        for micro_batch in range(self.micro_batches - warm):
            positions.append(self.recorder.position())
            self._pass(micro_batch + warm, back=False)
            self._pass(micro_batch, back=True)
        for micro_batch in range(self.micro_batches - warm, self.micro_batches):
            self._pass(micro_batch, back=True)
        self.recorder.collective(
            Collective("all_reduce", 1 << 24, "fsdp", 2), ALL_REDUCE
        )  # as soon as the host is there
        self.recorder.fixed("optimizer", 5_000)
        first = positions[ahead]
        times = (self.micro_batches - warm - ahead - 1) // kinds
        return Stretch(first, first, positions[ahead + kinds] - first, times, kinds)

    def _pass(self, micro_batch: int, back: bool) -> None:
        comes, goes = (self.rank + 1, self.rank - 1) if back else (self.rank - 1, self.rank + 1)
        if 0 <= comes < self.ranks:
            stream = RECEIVE_NEXT if back else RECEIVE_PREVIOUS
            self.recorder.transfer(
                Row.RECEIVE, Transfer(self.bytes, comes, self.rank, comes, micro_batch, back), stream
            )
            self.recorder.stream_waits_stream(COMPUTE, stream)
        for work in self.parts[back][micro_batch % len(self.parts[back])]:
            self._work(work)
        self.events.append(self.recorder.record(COMPUTE))
        if 0 <= goes < self.ranks:
            stream = SEND_PREVIOUS if back else SEND_NEXT
            self.recorder.stream_waits_stream(stream, COMPUTE)
            self.recorder.transfer(
                Row.SEND, Transfer(self.bytes, self.rank, goes, self.rank, micro_batch, back), stream
            )

    def _work(self, work: Work) -> None:
        recorder = self.recorder
        if work.what == "launch":
            for number in range(work.count):
                recorder.fixed("kernel", work.duration_ns + number % 7, work.stream)
        elif work.what == "collective":
            recorder.stream_waits_stream(ALL_REDUCE, COMPUTE)
            recorder.collective(Collective("all_reduce", work.duration_ns << 6, "fsdp", 2), ALL_REDUCE)
        elif work.what == "host":
            recorder.host("data", work.count)
        elif work.what == "sync":
            recorder.sync(recorder.record(work.stream))
        elif len(self.events) > 2 * work.back:
            recorder.wait(work.stream, self.events[-1 - 2 * work.back])


class Drawn(NamedTuple):
    """Of a rank: its works per kind of micro-batch, and driver calls at parts of its rows."""

    forward: list[list[Work]]
    backward: list[list[Work]]
    calls: list[tuple[float, int, bool]]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, list[Drawn]]:
    """Micro-batches, steps, ranks."""
    ranks, kinds, syncs = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.booleans())
    parts = st.lists(works(syncs), min_size=kinds, max_size=kinds)
    call = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from((0, 10_000, 300_000)), st.booleans())
    drawn = [Drawn(draw(parts), draw(parts), sorted(draw(st.lists(call, max_size=2)))) for _ in range(ranks)]
    return draw(st.sampled_from((30, 61, 120))), draw(st.integers(1, 2)), drawn


def recorded(run: tuple[int, int, list[Drawn]]) -> tuple[list[Program], list[list[HostCall]]]:
    micro_batches, steps, drawn = run
    programs, calls = [], []
    for number, own in enumerate(drawn):
        rank = Rank(number, len(drawn), micro_batches, own.forward, own.backward)
        stretches = tuple(rank.step() for _ in range(steps))
        programs.append(replace(rank.recorder.program(), stretches=stretches))
        rows = len(programs[-1].row_kind)
        calls.append([HostCall(int(part * rows), host_ns, waits) for part, host_ns, waits in own.calls])
    return programs, calls


def whole_setup() -> Setup:
    return load_text(SCENARIO, "folded").strategies[0]


@settings(max_examples=EXAMPLES, deadline=None)
@given(runs())
def test_times_without_most_periods_are_those_of_all(run: tuple[int, int, list[Drawn]]) -> None:
    programs, calls = recorded(run)
    setup = whole_setup()
    tries: list[int] = []

    def play(made: Sequence[Program], called: Sequence[Sequence[HostCall]]) -> list[Lanes]:
        tries.append(sum(len(program.row_kind) for program in made))
        return play_whole(setup, made, called)

    with mock.patch("sim.engine.folded.LAUNCH_QUEUE_ROWS", 1):  # look sooner than is wise
        folded = play_folded(programs, calls, play)
    event("folded" if tries[-1] < sum(len(program.row_kind) for program in programs) else "whole")
    whole = partial(play_whole, setup)(programs, calls)
    for ours, theirs in zip(folded, whole):
        assert ours.program is theirs.program
        for name in ("issue_ns", "start_ns", "end_ns", "host_end_ns", "device_end_ns"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=0.01, err_msg=name)
