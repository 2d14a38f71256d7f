"""The engine equals its naive reference on random worlds, and keeps the laws that need no reference.

SIM_EXAMPLES sets the number of worlds per test: 200 by default, tens of thousands for a night.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.engine.deadlock import DeadlockError
from sim.engine.play import play
from sim.program.passage import Passage
from sim.program.world import BURST, PASSAGE, Burst, World
from sim.timeline.expand import KernelTimes, expand
from sim.timeline.records import Played
from tests.property.naive_engine import NaiveEngine
from tests.property.worlds import worlds

CLOSE = {"rtol": 1e-9, "atol": 1e-6}  # of times around 1e3 ns: rounding of fractions and flows only
examples = settings(
    max_examples=int(os.environ.get("SIM_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@examples
@given(worlds())
def test_both_engines_agree_on_every_time(world: World) -> None:
    fast, naive = play(world), NaiveEngine(world).play()
    assert not naive.stuck
    for rank, times in enumerate(naive.times):
        columns = expand(world, fast, rank)
        got = np.stack([columns.row, columns.kernel, columns.issue_ns, columns.start_ns, columns.end_ns], axis=1)
        expected = np.array([(*which, *when) for which, when in sorted(times.items())]).reshape(-1, 5)
        np.testing.assert_allclose(got, expected, **CLOSE, err_msg=f"rank {rank}")
    np.testing.assert_allclose([rank.host_end_ns for rank in fast.ranks], naive.host_end, **CLOSE)
    np.testing.assert_allclose(fast.met_ns, naive.met, **CLOSE)
    np.testing.assert_allclose(fast.parted_ns, naive.parted, **CLOSE)


@examples
@given(worlds(crossed=True))
def test_both_engines_find_the_same_deadlocks(world: World) -> None:
    stuck = NaiveEngine(world).play().stuck
    try:
        play(world)
    except DeadlockError as deadlock:
        assert stuck
        assert len({(member.rank, member.stream) for member in deadlock.cycle}) == len(deadlock.cycle) > 1
    else:
        assert not stuck


@examples
@given(worlds(), st.integers(0, 2**32 - 1))
def test_no_decision_hangs_on_a_tie(world: World, seed: int) -> None:
    """Every time is a continuous function of every duration: a billionth more or less moves nothing by a millionth."""
    exact, nudged = magnified(world, seed, nudge=0.0), magnified(world, seed, nudge=1e-9)
    before, after = play(exact), play(nudged)
    for rank in range(len(world.ranks)):
        first, second = expand(exact, before, rank), expand(nudged, after, rank)
        np.testing.assert_allclose(first.start_ns, second.start_ns, rtol=1e-6, atol=1e-5 * MAGNIFIED)
        np.testing.assert_allclose(first.end_ns, second.end_ns, rtol=1e-6, atol=1e-5 * MAGNIFIED)


@examples
@given(worlds())
def test_a_stream_runs_one_thing_at_a_time_and_nothing_before_its_issue(world: World) -> None:
    played = play(world)
    for rank, program in enumerate(world.ranks):
        times = expand(world, played, rank)
        assert not np.isnan([times.issue_ns, times.start_ns, times.end_ns]).any()
        assert (times.start_ns >= times.issue_ns - 1e-6).all()
        assert (times.end_ns >= times.start_ns - 1e-6).all()
        for stream in range(-1, program.streams):
            on = times.stream == stream
            assert (times.start_ns[on][1:] >= times.end_ns[on][:-1] - 1e-6).all()
        assert_durations_lie_between_the_levels(world, rank, times)


@examples
@given(worlds())
def test_links_carry_every_byte_within_capacity_and_never_idle(world: World) -> None:
    played = play(world, record_rates=True)
    busy = [burst_intervals(world, played, rank) for rank in range(len(world.ranks))]
    moved = np.zeros(len(world.meetings))
    rate: dict[int, float] = {}
    changes = played.rates
    for (time_ns, number, bytes_per_ns), (next_ns, _, _) in zip(changes, [*changes[1:], (np.inf, -1, 0.0)]):
        rate[number] = bytes_per_ns
        if next_ns - time_ns < 1e-6:
            moved[list(rate)] += np.fromiter(rate.values(), float) * (next_ns - time_ns)
            continue
        rate = {flow: r for flow, r in rate.items() if r}
        used = [
            sum(r for flow, r in rate.items() if link in world.meetings[flow].links)
            for link in range(len(world.capacity_bytes_per_ns))
        ]
        assert (np.array(used) <= np.array(world.capacity_bytes_per_ns) * (1 + 1e-9)).all()
        for flow, r in rate.items():
            meeting = world.meetings[flow]
            computing = any(is_busy(busy[rank], time_ns + PROBE * (next_ns - time_ns)) for rank in meeting.ranks)
            cap = meeting.cap_bytes_per_ns * (meeting.slow if computing else 1.0)
            assert r <= cap * (1 + 1e-9)
            full = any(used[link] >= world.capacity_bytes_per_ns[link] * (1 - 1e-9) for link in meeting.links)
            assert full or r >= cap * (1 - 1e-9)
            moved[flow] += r * (next_ns - time_ns)
    np.testing.assert_allclose(moved, [meeting.bytes for meeting in world.meetings], rtol=1e-9, atol=1e-5)


@examples
@given(worlds())
def test_the_same_world_is_played_the_same_way_twice(world: World) -> None:
    first, second = play(world, record_rates=True), play(world, record_rates=True)
    assert first.rates == second.rates
    assert [rank.rows for rank in first.ranks] == [rank.rows for rank in second.ranks]
    for rank in range(len(world.ranks)):
        assert (expand(world, first, rank).end_ns == expand(world, second, rank).end_ns).all()


MAGNIFIED = 10**10  # a nanosecond of a random world becomes so many, to leave room for a nudge in whole numbers


def magnified(world: World, seed: int, nudge: float) -> World:
    """The same world with every duration and size times MAGNIFIED, give or take a relative nudge."""
    rng = np.random.default_rng(seed)

    def whole(values: int | np.ndarray) -> np.ndarray:
        exact = np.asarray(values, np.int64) * MAGNIFIED
        return exact + np.rint(exact * nudge * rng.standard_normal(exact.shape)).astype(np.int64)

    return replace(
        world,
        bursts=[Burst(whole(burst.host_ns), whole(burst.duration_ns)) for burst in world.bursts],
        passages=[magnified_passage(passage, whole) for passage in world.passages],
        ranks=[replace(program, host_ns=whole(program.host_ns)) for program in world.ranks],
        meetings=[
            replace(meeting, bytes=int(whole(meeting.bytes)), latency_ns=int(whole(meeting.latency_ns)))
            for meeting in world.meetings
        ],
    )


def magnified_passage(passage: Passage, whole: Callable[[np.ndarray], np.ndarray]) -> Passage:
    duration_ns = whole(passage.duration_ns)
    duration_ns[:, passage.beside] = duration_ns[0, passage.beside]
    return Passage(whole(passage.host_ns), duration_ns, passage.beside, passage.after, passage.raises)


def assert_durations_lie_between_the_levels(world: World, rank: int, times: KernelTimes) -> None:
    program = world.ranks[rank]
    for entry in np.flatnonzero(program.kind[times.row] == BURST):
        row, kernel = times.row[entry], times.kernel[entry]
        at_levels = world.bursts[program.argument[row]].duration_ns[:, kernel] * program.scale[row]
        took = times.end_ns[entry] - times.start_ns[entry]
        assert at_levels.min() - 1e-6 <= took <= at_levels.max() + 1e-6


PROBE = 0.6180339887  # of an interval: where no burst starts or ends, since their times are short fractions


def is_busy(intervals: np.ndarray, time_ns: float) -> bool:
    starts, ends = intervals
    return bool(((starts < time_ns) & (time_ns < ends)).any())


def burst_intervals(world: World, played: Played, rank: int) -> np.ndarray:
    """[2, bursts]: start of the first and end of the last kernel of every burst of a rank."""
    times = expand(world, played, rank)
    rows = np.flatnonzero(np.isin(world.ranks[rank].kind, (BURST, PASSAGE)))
    first, last = np.searchsorted(times.row, rows), np.searchsorted(times.row, rows, "right") - 1
    return np.stack([times.start_ns[first], times.end_ns[last]])
