"""Memory of a run whose equal periods repeat themselves in the allocator is, to the byte, that of the run played whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim import api
from sim.program.program import Program
from sim.runtime.record import record
from sim.scenario.setup import Setup
from sim.timeline.memory import MemoryTimeline
from tests.exact.test_folded_accumulation import CASES, setup_of
from tests.exact.test_folds import TENSOR
from tests.exact.test_folds import setup_of as pipeline_of

EXPANDABLE = "expandable_segments:True"


def assert_same(ours: MemoryTimeline, theirs: MemoryTimeline) -> None:
    for name in ("allocated_bytes", "active_bytes", "reserved_bytes", "block_bytes", "address"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.driver_calls == theirs.driver_calls
    assert ours.out_of_memory == theirs.out_of_memory


def events_played(setup: Setup, programs: list[Program], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Events that the allocator saw, and all of them, when one program after the other goes on where the last ended."""
    play, plain = api.device_play(setup), api.device_play(setup)
    count = 0
    whole = play._allocator.play

    def counting(*columns: np.ndarray) -> object:
        nonlocal count
        count += len(columns[0])
        return whole(*columns)

    monkeypatch.setattr(play._allocator, "play", counting)
    for program in programs:
        ours = play.play(program)
        assert_same(ours, plain.play(replace(program, stretches=())))
    return count, ours.played


@pytest.mark.parametrize("allocator", ["", EXPANDABLE])
@pytest.mark.parametrize("case", CASES)
def test_accumulation(case: str, allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(case)
    setup = replace(setup, allocator=allocator, batch=replace(setup.batch, accumulation=40))
    played, events = events_played(setup, [record(setup, 4), record(setup, 6)], monkeypatch)
    assert played < 0.6 * events


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe-v"])
@pytest.mark.parametrize("rank", range(4))
def test_pipelines(rank: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = pipeline_of("megatron", schedule, TENSOR, 2)
    events_played(setup, [record(setup, 3, rank=rank)], monkeypatch)


def test_memory_that_runs_out_on_the_way() -> None:
    """The limit lies so that a later step does not fit, or a period of the first."""
    setup = setup_of("fsdp")
    setup = replace(setup, batch=replace(setup.batch, accumulation=20))
    program = record(setup, 3)
    peak = int(api.device_play(setup).play(program).reserved_bytes.max())
    ended = set()
    for missing in range(2 << 20, peak, 8 << 20):
        plays = [api.MemoryPlay("", peak, peak - missing, setup.torch) for _ in range(2)]
        ours, theirs = plays[0].play(program), plays[1].play(replace(program, stretches=()))
        assert_same(ours, theirs)
        ended.add(ours.out_of_memory is not None)
    assert ended == {True, False}
