"""Random small worlds for the engine, with the awkward cases in them.

Kernels of no length, meetings of no bytes or no links, launch queues of 2 to 1,024, hosts from free to slower than
their kernels, events across streams, templates that repeat.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from sim.program.passage import Passage
from sim.program.world import Meeting, World
from sim.program.world_builder import WorldBuilder

ACTIONS = ("launch",) * 3 + ("pass",) * 2 + ("meet",) * 4 + ("record", "wait", "sync", "device_sync", "host")


@st.composite
def worlds(draw: st.DrawFn, crossed: bool = False) -> World:
    """All ranks post their meetings in one order, so that nothing deadlocks; `crossed`: each in its own."""
    ranks, streams = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    levels, links = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    host_ns = st.integers(0, draw(st.sampled_from([0, 1, 5, 40])))  # bound by the GPU ... by the host
    kernels = draw(st.lists(st.tuples(host_ns, durations(levels)), min_size=1, max_size=12))
    queue_rows = draw(st.sampled_from([2, 8, 16, 1024, 1024, 1024]))
    builder = WorldBuilder(
        streams=[streams] * ranks,
        kernel_ns=[[kernel[level] for _, kernel in kernels] for level in range(levels)],
        launch_ns=[cost for cost, _ in kernels],
        capacity_bytes_per_ns=[draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for _ in range(links)],
        queue_rows=queue_rows,
    )
    number = st.integers(0, len(kernels) - 1)
    recorded: list[list[int]] = [[] for _ in range(ranks)]
    unposted: list[list[tuple[int, int, Meeting]]] = [[] for _ in range(ranks)]

    def post(rank: int) -> None:
        meeting_id, stream, meeting = unposted[rank].pop(
            draw(st.integers(0, len(unposted[rank]) - 1)) if crossed else 0
        )
        builder.meet(rank, stream, meeting, draw(host_ns), communicator=meeting_id)

    for step in range(draw(st.integers(1, 25))):
        rank, stream = draw(st.integers(0, ranks - 1)), draw(st.integers(0, streams - 1))
        match draw(st.sampled_from(ACTIONS)):
            case "launch":
                scale = draw(st.sampled_from([1.0, 1.0, 0.5, 1.75]))
                builder.launches(rank, stream, draw(st.lists(number, min_size=1, max_size=8)), scale)
            case "pass" if queue_rows >= 1024:
                builder.passes(rank, stream, builder.passage(draw(passages(levels, host_ns))))
            case "record":
                recorded[rank].append(builder.record(rank, stream, draw(host_ns)))
            case "wait" if recorded[rank]:
                builder.wait(rank, stream, draw(st.sampled_from(recorded[rank])), draw(host_ns))
            case "sync" if recorded[rank] and draw(st.booleans()):
                builder.sync(rank, draw(st.sampled_from(recorded[rank])), draw(host_ns))
            case "device_sync" if draw(st.booleans()):
                builder.device_sync(rank, draw(host_ns))
            case "host":
                builder.host(rank, draw(st.integers(0, 60)))
            case "meet":
                meeting = draw(meetings(ranks, streams, links, levels))
                for party_rank, party_stream in meeting.parties:
                    unposted[party_rank].append((step, party_stream, meeting))
                for party_rank in range(ranks):
                    while unposted[party_rank] and (not crossed or draw(st.booleans())):
                        post(party_rank)
    for rank in range(ranks):
        while unposted[rank]:
            post(rank)
    return builder.build()


@st.composite
def passages(draw: st.DrawFn, levels: int, host_ns: st.SearchStrategy[int]) -> Passage:
    """Kernels and transfers beside them; some are waited for at once, some two at a time, some by their last record."""
    duration_ns: list[list[int]] = []
    beside, after, raises = [], [], []
    unjoined: list[int] = []

    def entry(on_side: bool, waits: int = -1, work: list[int] | None = None, lifts: int = 0) -> int:
        duration_ns.append(work or [0] * levels)
        beside.append(on_side)
        after.append(waits)
        raises.append(lifts)
        return len(beside) - 1

    def kernels() -> None:
        for _ in range(draw(st.integers(0, 3))):
            entry(False, work=draw(durations(levels)))

    entry(False, work=draw(durations(levels)))
    for _ in range(draw(st.integers(0, 4))):
        kernels()
        entry(True, waits=entry(False))
        entry(True, work=[draw(st.integers(0, 80))] * levels, lifts=draw(st.integers(0, levels - 1)))
        unjoined.append(entry(True))
        kernels()
        if draw(st.booleans()):
            entry(False, waits=unjoined.pop())
            unjoined.clear()
        kernels()
    if unjoined:
        entry(False, waits=unjoined[-1])
    costs = [draw(host_ns) for _ in beside]
    return Passage(
        np.array(costs), np.array(duration_ns).T.copy(), np.array(beside, bool), np.array(after), np.array(raises)
    )


@st.composite
def durations(draw: st.DrawFn, levels: int) -> list[int]:
    """Of one kernel at each level: none at all, or longer the more contended."""
    kernel = [draw(st.integers(0, 60))]
    for _ in range(levels - 1):
        kernel.append(kernel[-1] + draw(st.integers(0, 30)) if kernel[0] else 0)
    return kernel


@st.composite
def meetings(draw: st.DrawFn, ranks: int, streams: int, links: int, levels: int) -> Meeting:
    """A copy, a send with its recv, or a collective."""
    parties = draw(st.sampled_from([1, 1, min(2, ranks), draw(st.integers(1, ranks))]))
    path = draw(st.lists(st.integers(0, links - 1), max_size=3, unique=True))
    return Meeting(
        parties=tuple(
            (rank, draw(st.integers(0, streams - 1))) for rank in draw(st.permutations(range(ranks)))[:parties]
        ),
        bytes=draw(st.sampled_from([0, 1, 7, 50, 300])),
        links=tuple(path),
        latency_ns=draw(st.sampled_from([0, 3, 20])),
        cap_bytes_per_ns=draw(st.sampled_from([0.4, 1.5, *([math.inf] if path else [])])),
        slow=draw(st.sampled_from([1.0, 0.5])),
        level=draw(st.integers(0, levels - 1)),
        weight=draw(st.sampled_from([1, 1, 2, 3])),
    )
