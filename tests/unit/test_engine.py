"""The engine's rules one by one, on worlds small enough to play by hand. Times in ns, links in bytes/ns."""

from __future__ import annotations

import pytest

from sim.engine.deadlock import DeadlockError
from sim.engine.play import play
from sim.program.world import Meeting, World
from sim.program.world_builder import WorldBuilder
from sim.timeline.expand import expand


def spans(world: World, rank: int = 0, stream: int = 0) -> list[tuple[float, float]]:
    """Start and end of everything on a stream (-1: the host alone), in order."""
    times = expand(world, play(world), rank)
    on = times.stream == stream
    return list(zip(times.start_ns[on].tolist(), times.end_ns[on].tolist()))


def copy(stream: int = 1, *, rank: int = 0, size: int = 0, latency_ns: int = 0, level: int = 1) -> Meeting:
    return Meeting(
        parties=((rank, stream),), bytes=size, links=(0,) if size else (), latency_ns=latency_ns, level=level
    )


def test_kernels_of_a_stream_follow_each_other_when_the_host_runs_ahead() -> None:
    builder = WorldBuilder([1], kernel_ns=[[10, 20]], launch_ns=[1, 1])
    builder.launches(0, 0, [0, 1, 0])
    assert spans(builder.build()) == [(1, 11), (11, 31), (31, 41)]


def test_a_slow_host_starves_its_stream() -> None:
    builder = WorldBuilder([1], kernel_ns=[[10, 200]], launch_ns=[50, 50])
    builder.launches(0, 0, [0, 0, 1, 0])
    assert spans(builder.build()) == [(50, 60), (100, 110), (150, 350), (350, 360)]


def test_a_scale_stretches_the_kernels_of_one_burst() -> None:
    builder = WorldBuilder([1], kernel_ns=[[10]], launch_ns=[0])
    builder.launches(0, 0, [0, 0], scale=1.5)
    builder.launches(0, 0, [0])
    assert spans(builder.build()) == [(0, 15), (15, 30), (30, 40)]


def test_an_event_orders_two_streams() -> None:
    builder = WorldBuilder([2], kernel_ns=[[100]], launch_ns=[1])
    builder.launches(0, 0, [0])
    event = builder.record(0, 0)
    builder.wait(0, 1, event)
    builder.launches(0, 1, [0])
    assert spans(builder.build(), stream=1) == [(1, 101), (101, 201)]


def test_a_sync_stops_the_host_until_the_event_has_fired() -> None:
    builder = WorldBuilder([1], kernel_ns=[[100]], launch_ns=[1])
    builder.launches(0, 0, [0])
    builder.sync(0, builder.record(0, 0), 5)
    builder.launches(0, 0, [0])
    world = builder.build()
    assert spans(world, stream=-1) == [(1, 101)]
    assert spans(world) == [(1, 101), (101, 101), (102, 202)]


def test_a_device_sync_stops_the_host_until_every_stream_is_idle() -> None:
    builder = WorldBuilder([3], kernel_ns=[[100, 30]], launch_ns=[1, 1])
    builder.launches(0, 0, [0])
    builder.launches(0, 1, [1])
    builder.device_sync(0, 5)
    builder.host(0, 7)
    builder.launches(0, 1, [1])
    world = builder.build()
    assert spans(world, stream=-1) == [(2, 101), (101, 108)]
    assert spans(world, stream=1) == [(2, 32), (109, 139)]


def test_a_device_sync_costs_only_itself_when_nothing_is_pending() -> None:
    builder = WorldBuilder([2], kernel_ns=[[10]], launch_ns=[1])
    builder.launches(0, 0, [0])
    builder.host(0, 500)
    builder.device_sync(0, 5)
    assert spans(builder.build(), stream=-1) == [(1, 501), (501, 506)]


def test_a_full_launch_queue_stops_the_host_until_a_whole_burst_has_room() -> None:
    builder = WorldBuilder([1], kernel_ns=[[100]], launch_ns=[1], queue_rows=4)  # so bursts of one kernel
    builder.launches(0, 0, [0] * 6)
    times = expand(world := builder.build(), play(world), 0)
    assert times.issue_ns.tolist() == [1, 2, 3, 4, 102, 202]
    assert times.start_ns.tolist() == [1, 101, 201, 301, 401, 501]


def test_a_meeting_starts_with_its_last_party_and_releases_all_together() -> None:
    builder = WorldBuilder([1, 1], kernel_ns=[[100]], launch_ns=[0], capacity_bytes_per_ns=[2.0])
    meeting = Meeting(parties=((0, 0), (1, 0)), bytes=60, links=(0,), latency_ns=10)
    builder.launches(1, 0, [0])
    for rank in (0, 1):
        builder.meet(rank, 0, meeting)
    played = play(world := builder.build())
    assert (played.met_ns, played.parted_ns) == ([100], [140])
    assert spans(world, rank=0) == [(0, 140)]
    assert spans(world, rank=1) == [(0, 100), (100, 140)]


def test_a_late_change_costs_only_the_rest() -> None:
    builder = WorldBuilder([2], kernel_ns=[[100], [200]], launch_ns=[0], capacity_bytes_per_ns=[1.0])
    builder.launches(0, 0, [0, 0])
    builder.meet(0, 1, copy(size=60), host_ns=50)  # 50..110: half done alone, 30 % contended, 20 % alone
    world = builder.build()
    assert spans(world) == [(0, 130), (130, 230)]
    assert spans(world, stream=1) == [(50, 110)]


def test_the_highest_level_of_the_running_meetings_counts() -> None:
    builder = WorldBuilder([3], kernel_ns=[[100], [200], [400]], launch_ns=[0])
    builder.launches(0, 0, [0])
    builder.meet(0, 1, copy(1, latency_ns=100, level=1))  # 0..100 at half speed: 50 % done, less ...
    builder.meet(0, 2, copy(2, latency_ns=40, level=2))  # ... 0..40 at a quarter: 10 % + 30 % by 100
    assert spans(builder.build()) == [(0, 160)]


def test_a_level_that_flips_twice_in_one_instant_leaves_one_piece() -> None:
    builder = WorldBuilder([3], kernel_ns=[[10], [20]], launch_ns=[0], capacity_bytes_per_ns=[1.0])
    builder.meet(0, 1, copy(size=30))  # 0..30
    ended = builder.record(0, 1)
    builder.host(0, 5)
    builder.launches(0, 0, [0])  # 5..25, whole at level 1
    builder.wait(0, 0, ended)
    builder.launches(0, 0, [0])  # starts alone at 30, but in the same instant ...
    builder.host(0, 23)
    builder.wait(0, 2, ended)
    builder.meet(0, 2, copy(2, size=20))  # ... the second copy starts: 30..50
    world = builder.build()
    assert spans(world) == [(5, 25), (25, 30), (30, 50)]
    assert [piece[2:5] for piece in play(world).ranks[0].pieces] == [(5, 1, 0), (30, 1, 0)]


def test_a_starved_burst_whose_level_changes_twice_before_its_next_kernel_loses_nothing() -> None:
    builder = WorldBuilder([2], kernel_ns=[[10], [20]], launch_ns=[50])
    builder.meet(0, 1, copy(latency_ns=62, level=0))
    builder.meet(0, 1, copy(latency_ns=18, level=1))  # 62..80, while the stream waits for the launch at 100
    builder.meet(0, 1, copy(latency_ns=75, level=0))
    builder.meet(0, 1, copy(latency_ns=100, level=1))  # from 155: half of the third kernel is done
    builder.launches(0, 0, [0, 0, 0])
    assert spans(builder.build()) == [(50, 60), (100, 110), (150, 165)]


def test_two_level_changes_inside_a_starved_kernel_keep_what_is_done() -> None:
    builder = WorldBuilder([2], kernel_ns=[[20], [40]], launch_ns=[50])
    builder.meet(0, 1, copy(latency_ns=105, level=0))
    builder.meet(0, 1, copy(latency_ns=10, level=1))  # 105..115: a quarter alone, a quarter contended, half alone
    builder.launches(0, 0, [0, 0, 0])
    assert spans(builder.build()) == [(50, 70), (100, 125), (150, 170)]


def test_eight_gpus_share_one_host_memory() -> None:
    pcie, host_memory = 25.0, 45.0
    builder = WorldBuilder([1] * 8, [[1]], [0], capacity_bytes_per_ns=[pcie] * 8 + [host_memory])
    for rank in range(8):
        builder.meet(rank, 0, Meeting(parties=((rank, 0),), bytes=45_000_000, links=(rank, 8), latency_ns=10))
    assert play(builder.build()).parted_ns == [10 + 8_000_000] * 8


def test_a_transfer_slows_while_a_gpu_computes() -> None:
    builder = WorldBuilder([2], kernel_ns=[[30], [30]], launch_ns=[0])
    builder.meet(0, 1, Meeting(parties=((0, 1),), bytes=100, cap_bytes_per_ns=2.0, slow=0.5))
    builder.launches(0, 0, [0])  # 30 bytes by 30, then 70 at 2 bytes/ns
    assert spans(builder.build(), stream=1) == [(0, 65)]


def test_a_flow_takes_what_another_leaves_when_it_ends() -> None:
    builder = WorldBuilder([2], [[1]], [0], capacity_bytes_per_ns=[2.0])
    builder.meet(0, 0, copy(0, size=50, level=0))
    builder.meet(0, 1, copy(1, size=150, level=0))  # 50 bytes by 50 at half, then 100 alone
    assert play(builder.build()).parted_ns == [50, 100]


def test_crossed_collectives_are_a_deadlock() -> None:
    builder = WorldBuilder([2, 2], [[1]], [0])
    first = Meeting(parties=((0, 0), (1, 0)), bytes=0)
    second = Meeting(parties=((0, 1), (1, 1)), bytes=0)
    for rank, (one, other) in enumerate([((0, first), (1, second)), ((1, second), (0, first))]):
        builder.meet(rank, *one)
        builder.wait(rank, other[0], builder.record(rank, one[0]))
        builder.meet(rank, *other)
    with pytest.raises(DeadlockError) as caught:
        play(builder.build())
    assert [str(member) for member in caught.value.cycle] == [
        "rank 0 stream 0 at row 0 waits in meeting 0 for rank 1 stream 0",
        "rank 1 stream 0 at row 2 waits for event 1",
        "rank 1 stream 1 at row 0 waits in meeting 1 for rank 0 stream 1",
        "rank 0 stream 1 at row 2 waits for event 0",
    ]


def test_a_host_that_syncs_before_it_sends_can_be_part_of_a_deadlock() -> None:
    builder = WorldBuilder([2, 2], [[1]], [0])
    there, back = Meeting(parties=((0, 0), (1, 0)), bytes=0), Meeting(parties=((0, 1), (1, 1)), bytes=0)
    builder.meet(0, 0, there)
    builder.device_sync(0)
    builder.meet(0, 1, back)
    builder.meet(1, 1, back)
    builder.sync(1, builder.record(1, 1))
    builder.meet(1, 0, there)
    with pytest.raises(DeadlockError) as caught:
        play(builder.build())
    assert [(member.rank, member.stream, member.row) for member in caught.value.cycle] == [
        (0, 0, 0), (1, 0, None), (1, None, 2), (1, 1, 0), (0, 1, None), (0, None, 1),
    ]  # fmt: skip


def test_a_world_without_rows_ends_at_once() -> None:
    world = WorldBuilder([1, 0], [[1]], [0]).build()
    assert play(world).end_ns == 0
    assert len(expand(world, play(world), 0).row) == 0
