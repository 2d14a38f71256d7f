"""Copies that share links: bytes are conserved, no link is overfull, equal transfers end together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.engine.play import play
from sim.program.world import Meeting
from sim.program.world_builder import WorldBuilder
from sim.timeline.expand import expand

BYTES = st.integers(1, 10**9)
RATES = st.floats(0.5, 100.0)


def ends_of(meetings: list[Meeting], capacity: list[float], streams: int = 1) -> list[float]:
    """When each rank's only copy ends; rank i posts meeting i."""
    builder = WorldBuilder([streams] * len(meetings), [[1]], [1], capacity)
    for rank, meeting in enumerate(meetings):
        builder.meet(rank, 0, meeting)
    world = builder.build()
    played = play(world)
    return [float(expand(world, played, rank).end_ns[0]) for rank in range(len(meetings))]


@given(n=st.integers(1, 8), size=BYTES, cap=RATES, shared=RATES)
def test_equal_copies_of_the_gpus_of_a_node_end_together(n: int, size: int, cap: float, shared: float) -> None:
    """Each over its own link, all over the host's memory: as if each had the smaller of its link and its share."""
    meetings = [
        Meeting(parties=((rank, 0),), bytes=size, links=(rank, n), cap_bytes_per_ns=cap, level=0) for rank in range(n)
    ]
    ends = ends_of(meetings, [*[cap] * n, shared])
    expected = size / min(cap, shared / n)
    assert all(abs(end - expected) <= 1e-9 * expected for end in ends)


@given(sizes=st.lists(BYTES, min_size=1, max_size=6), cap=RATES, shared=RATES)
def test_a_shared_link_is_never_overfull_nor_idle_while_it_is_the_bottleneck(
    sizes: list[int], cap: float, shared: float
) -> None:
    n = len(sizes)
    meetings = [
        Meeting(parties=((rank, 0),), bytes=size, links=(rank, n), cap_bytes_per_ns=cap, level=0)
        for rank, size in enumerate(sizes)
    ]
    last = max(ends_of(meetings, [*[cap] * n, shared]))
    least = max(sum(sizes) / shared, max(sizes) / cap)
    assert last >= least * (1 - 1e-9)
    assert last <= (sum(sizes) / shared + max(sizes) / cap) * (1 + 1e-9)


@given(sizes=st.lists(BYTES, min_size=2, max_size=4), link=RATES, memory=RATES, read=RATES)
def test_reads_of_drives_and_copies_share_main_memory_and_nothing_else(
    sizes: list[int], link: float, memory: float, read: float
) -> None:
    """The first rank's bytes come from the drive, the others' cross their host links; all pass main memory. Bytes over
    time are never more than each link carries, and no drive is slower than its share."""
    n = len(sizes)
    first = Meeting(parties=((0, 0),), bytes=sizes[0], links=(0, n), cap_bytes_per_ns=read)
    others = [
        Meeting(parties=((rank, 0),), bytes=size, links=(rank, n), cap_bytes_per_ns=link)
        for rank, size in enumerate(sizes[1:], 1)
    ]
    ends = ends_of([first, *others], [read, *[link] * (n - 1), memory])
    assert ends[0] >= sizes[0] / min(read, memory) * (1 - 1e-9)
    assert max(ends) >= max(sum(sizes) / memory, sizes[0] / read) * (1 - 1e-9)
    assert ends[0] <= sizes[0] / min(read, memory / n) * (1 + 1e-9)


@given(n=st.integers(1, 8), size=BYTES, read=RATES, memory=RATES)
def test_the_ranks_of_a_node_read_its_drives_together(n: int, size: int, read: float, memory: float) -> None:
    """n equal reads of the node's drives end together, as if each had its share of the drives and of main memory: what
    one rank that stands for all of them is given."""
    together = [Meeting(parties=((rank, 0),), bytes=size, links=(0, 1), cap_bytes_per_ns=read) for rank in range(n)]
    ends = ends_of(together, [read, memory])
    alone = Meeting(parties=((0, 0),), bytes=size, links=(0, 1), cap_bytes_per_ns=read / n)
    (expected,) = ends_of([alone], [read / n, memory / n])
    assert all(abs(end - expected) <= 1e-9 * expected for end in ends)
