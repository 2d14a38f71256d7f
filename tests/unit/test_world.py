"""What a world and its builder accept, join and refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.program.world import BURST, Burst, Meeting, RankProgram, World, WorldError
from sim.program.world_builder import WorldBuilder


def builder(**settings: int) -> WorldBuilder:
    return WorldBuilder([2, 2], kernel_ns=[[10, 20], [15, 30]], launch_ns=[1, 2], **settings)


def problems(world: World) -> tuple[str, ...]:
    with pytest.raises(WorldError) as caught:
        world.validate()
    return caught.value.problems


def test_neighbouring_launches_on_one_stream_become_one_burst() -> None:
    build = builder()
    build.launches(0, 0, [0])
    build.launches(0, 0, [1, 0])
    build.launches(0, 1, [0])
    build.launches(0, 1, [0], scale=2.0)
    world = build.build()
    assert [world.bursts[burst].size for burst in world.ranks[0].argument] == [3, 1, 1]
    assert world.ranks[0].scale.tolist() == [1, 1, 2]


def test_equal_bursts_share_a_template_across_ranks_and_streams() -> None:
    build = builder()
    for rank, stream in ((0, 0), (0, 1), (1, 1)):
        build.launches(rank, stream, [0, 1])
    world = build.build()
    assert len(world.bursts) == 1
    assert world.bursts[0].host_ns.tolist() == [1, 2]
    assert world.bursts[0].duration_ns.tolist() == [[10, 20], [15, 30]]


def test_a_long_run_of_launches_is_cut_at_256_kernels() -> None:
    build = builder()
    build.launches(0, 0, [0] * 600)
    world = build.build()
    assert [world.bursts[burst].size for burst in world.ranks[0].argument] == [256, 256, 88]


def test_a_burst_takes_a_quarter_of_a_short_launch_queue() -> None:
    build = builder(queue_rows=8)
    build.launches(0, 0, [0] * 5)
    assert [build.build().bursts[b].size for b in (0, 1)] == [2, 1]


def test_an_ended_burst_is_not_joined() -> None:
    build = builder()
    build.launches(0, 0, [0])
    build.end_burst(0)
    build.launches(0, 0, [1])
    assert build.build().ranks[0].kind.tolist() == [BURST, BURST]


def test_meetings_are_matched_by_order_and_by_communicator() -> None:
    build = builder()
    small = Meeting(parties=((0, 0), (1, 0)), bytes=0)
    large = replace(small, latency_ns=5)
    assert [build.meet(0, 0, m, communicator=c) for m, c in ((small, "a"), (large, "a"), (small, "b"))] == [0, 1, 2]
    assert [build.meet(1, 0, m, communicator=c) for m, c in ((small, "b"), (small, "a"), (large, "a"))] == [2, 0, 1]
    assert build.build().meetings == [small, large, small]


def test_parties_that_describe_a_meeting_differently_are_a_problem() -> None:
    build = builder()
    meeting = Meeting(parties=((0, 0), (1, 0)), bytes=0)
    build.meet(0, 0, meeting)
    build.meet(1, 0, replace(meeting, level=1))
    with pytest.raises(WorldError, match="meeting 0: rank 1 posts"):
        build.build()


def test_fractions_of_nanoseconds_are_refused() -> None:
    with pytest.raises(WorldError, match="whole nanoseconds"):
        WorldBuilder([1], kernel_ns=[[1.5]], launch_ns=[1])


def test_a_party_that_never_posts_is_found_before_the_run() -> None:
    build = builder()
    build.meet(0, 0, Meeting(parties=((0, 0), (1, 1)), bytes=0))
    with pytest.raises(WorldError, match="meeting 0: rank 1 never posts it on stream 1"):
        build.build()


def test_a_wait_must_follow_its_record_on_the_same_rank() -> None:
    build = builder()
    event = build.record(0, 0)
    build.wait(1, 0, event)
    with pytest.raises(WorldError, match="rank 1 row 0: waits for event 0"):
        build.build()


def test_all_problems_of_a_world_are_reported_together() -> None:
    rows = RankProgram(
        streams=1,
        kind=np.array([0, 1, 9]),
        stream=np.array([3, 0, 0]),
        argument=np.array([0, 5, 0]),
        host_ns=np.array([0, -1, 0]),
        scale=np.array([1.0, 1.0, 0.0]),
    )
    world = World(
        ranks=[rows],
        bursts=[Burst(np.array([1, 1]), np.array([[0, 5], [3, 5]]))],
        meetings=[
            Meeting(parties=((0, 0), (0, 0)), bytes=7, level=2),
            Meeting(parties=((0, 0),), bytes=-1, links=(4, 4), latency_ns=1, cap_bytes_per_ns=0.0),
        ],
        capacity_bytes_per_ns=[0.0],
        events=1,
        levels=2,
        queue_rows=4,
    )
    assert problems(world) == (
        "link 0: capacity 0.0 bytes/ns must be finite and above zero",
        "burst 0: 2 kernels, more than 1",
        "burst 0: a kernel of no duration alone must have none contended, and the reverse",
        "meeting 0: parties ((0, 0), (0, 0)): at least one, each once",
        "meeting 0: bytes without a link need a cap",
        "meeting 0: level 2, but the world has 2",
        "meeting 1: links (4, 4): each at most once",
        "meeting 1: -1 bytes after 1 ns: neither may be negative",
        "meeting 1: cap 0.0 bytes/ns, slowed by 1.0: both must be above zero",
        "meeting 1: links (4, 4), but the world has 1",
        "rank 0 row 2: unknown kind of row",
        "rank 0 row 0: no such stream",
        "rank 0 row 1: no such burst, event, meeting or passage",
        "rank 0 row 1: negative host time",
        "rank 0 row 2: scale must be finite and above zero",
    )


def test_an_event_recorded_twice_is_a_problem() -> None:
    build = builder()
    build.record(0, 0)
    world = build.build()
    assert problems(replace(world, ranks=[world.ranks[0]] * 2)) == ("event 0: recorded 2 times",)
