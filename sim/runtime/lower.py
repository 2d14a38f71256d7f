"""From a program to the world that the engine plays: kernels get durations, collectives a path, the driver its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sim.cost.model import CostModel
from sim.cost.overlap import LEVELS
from sim.hardware.mesh import Mesh, Span
from sim.program.kernels import Collective, HostCopy, Transfer
from sim.program.program import (
    COMPUTE,
    RECEIVE_NEXT,
    RECEIVE_PREVIOUS,
    SEND_NEXT,
    SEND_PREVIOUS,
    STREAM_NAMES,
    Ints,
    Program,
    Row,
)
from sim.program.world import Meeting, World
from sim.program.world_builder import WorldBuilder

REDUCED_OVER_CONTEXT = ("dp", "fsdp")
"""Groups in which context-parallel ranks take part: each has gradients of some tokens, like a data-parallel rank."""
NVLINK, NIC, DOWN, UP, HOST_MEMORY = range(5)  # links of a rank; down and up: its host link to and from the host
LINKS_PER_RANK = 5
OTHER_END = {
    SEND_NEXT: RECEIVE_PREVIOUS,
    RECEIVE_PREVIOUS: SEND_NEXT,
    SEND_PREVIOUS: RECEIVE_NEXT,
    RECEIVE_NEXT: SEND_PREVIOUS,
}
DOWN_WEIGHT = 2
"""Both ways at once, copies to the host get twice what copies from it get: 24-25 and 11-13 GB/s on A100 (COSTS.md 4)."""
COPY_LEVEL, COLLECTIVE_LEVEL = 1, 2  # of contention: kernels beside a copy engine, beside a collective


@dataclass(frozen=True, slots=True)
class HostCall:
    """A driver call of the allocator: before memory event `event`, for `host_ns`; `waits`: until the device is idle."""

    event: int
    host_ns: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Lowered:
    """A world of the simulated ranks. `entries`: per rank, where each row of its program stands among the expanded ones."""

    world: World
    entries: tuple[Ints, ...]


def lower(
    programs: Sequence[Program], cost: CostModel, mesh: Mesh, host_calls: Sequence[Iterable[HostCall]] = ()
) -> Lowered:
    """The programs of all pipeline ranks (one without a pipeline); each stands for all ranks of its symmetric groups.

    A collective on the compute stream blocks it: among symmetric peers it is a kernel of the time that it takes alone.
    """
    kernels = {kernel: number for number, kernel in enumerate(dict.fromkeys(k for p in programs for k in p.kernels))}
    blocking = dict.fromkeys(c for p in programs for c in p.collectives)
    blocking_ns = [round(cost.collective(c, placement(mesh, c)).alone_ns) for c in blocking]
    kernel_ns = [[*(cost.contended_ns(kernel, level) for kernel in kernels), *blocking_ns] for level in LEVELS]
    launch_ns = [cost.launch_host_ns(kernel) for kernel in kernels] + [cost.collective_host_ns(c) for c in blocking]
    blocking_numbers = {collective: number for number, collective in enumerate(blocking, len(kernels))}
    forms, host = cost.collectives, cost.host_links(mesh.gpus_per_node)
    capacities = (
        forms.fabric_bytes_per_s, forms.network_bytes_per_s, host.device_to_host_bytes_per_s,
        host.host_to_device_bytes_per_s, host.shared_bytes_per_s,
    )  # fmt: skip
    links = [capacity / 1e9 for capacity in capacities]
    builder = WorldBuilder([len(STREAM_NAMES)] * len(programs), kernel_ns, launch_ns, links * len(programs))
    entries = []
    for rank, program in enumerate(programs):
        numbers = np.array([kernels[kernel] for kernel in program.kernels], np.int64)
        blocking_of_rank = np.array([blocking_numbers[c] for c in program.collectives], np.int64)
        lowering = _Lowering(rank, program, numbers, blocking_of_rank, cost, mesh, builder)
        entries.append(lowering.run(host_calls[rank] if host_calls else ()))
    return Lowered(builder.build(), tuple(entries))


class _Lowering:
    """Walks a rank's rows once; runs of launches on one stream go to the builder together.

    `kernel_numbers`, `collective_numbers`: the world's number of each kernel of the program, and of the kernel that
    stands for a collective where it blocks compute.
    """

    def __init__(
        self, rank: int, program: Program, kernel_numbers: Ints, collective_numbers: Ints, cost: CostModel, mesh: Mesh,
        builder: WorldBuilder,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.program = program
        self.kernel_numbers = kernel_numbers
        self.collective_numbers = collective_numbers
        self.cost = cost
        self.mesh = mesh
        self.builder = builder
        self.meetings: dict[tuple[object, int], Meeting] = {}
        self.events: dict[int, int] = {}  # program's number -> world's number
        self.event_ns = cost.host.event_ns

    def run(self, host_calls: Iterable[HostCall]) -> Ints:
        """Returns the rows' places among the expanded entries."""
        program = self.program
        calls_at: dict[int, list[HostCall]] = {}
        for call in host_calls:
            calls_at.setdefault(int(program.mem_row[call.event]), []).append(call)
        kinds, streams, arguments = program.row_kind, program.row_stream, program.row_argument.copy()
        rows = len(kinds)
        launch = kinds == Row.LAUNCH
        arguments[launch] = self.kernel_numbers[arguments[launch]]
        blocking = (kinds == Row.COLLECTIVE) & (streams == COMPUTE)
        arguments[blocking] = self.collective_numbers[arguments[blocking]]
        launch |= blocking
        starts_run = np.ones(rows, bool)
        starts_run[1:] = ~(launch[1:] & launch[:-1] & (streams[1:] == streams[:-1]))
        for row in calls_at:
            if row < rows:
                starts_run[row] = True
        borders = [*np.flatnonzero(starts_run).tolist(), rows]
        inserted = np.zeros(rows + 1, np.int64)
        kinds_list, streams_list, arguments_list = kinds.tolist(), streams.tolist(), arguments.tolist()
        for first, end in pairwise(borders):
            for call in calls_at.get(first, ()):
                inserted[first] += self._driver(call)
            if launch[first]:
                self.builder.launches(self.rank, streams_list[first], arguments_list[first:end])
            else:
                self._row(kinds_list[first], streams_list[first], arguments_list[first])
        for call in calls_at.get(rows, ()):
            self._driver(call)
        return np.arange(rows) + np.cumsum(inserted[:rows])

    def _driver(self, call: HostCall) -> int:
        """Returns the number of entries it takes."""
        if call.waits:
            self.builder.device_sync(self.rank)
        self.builder.host(self.rank, call.host_ns)
        return 2 if call.waits else 1

    def _row(self, kind: int, stream: int, argument: int) -> None:
        builder, rank = self.builder, self.rank
        if kind == Row.RECORD:
            self.events[argument] = builder.record(rank, stream, self.event_ns)
        elif kind == Row.WAIT:
            builder.wait(rank, stream, self.events[argument], self.event_ns)
        elif kind == Row.SYNC:
            builder.sync(rank, self.events[argument])
        elif kind == Row.COLLECTIVE:
            collective = self.program.collectives[argument]
            builder.meet(rank, stream, self._meeting(collective, stream), self.cost.collective_host_ns(collective))
        elif kind in (Row.SEND, Row.RECEIVE):
            transfer = self._transfer(self.program.transfers[argument], stream, kind == Row.SEND)
            builder.meet(rank, stream, transfer, self.cost.host.collective_ns)
        elif kind == Row.COPY:
            builder.meet(rank, stream, self._copy(self.program.copies[argument], stream), self.cost.host.launch_ns)
        else:
            builder.host(rank, self.cost.host_work_ns(self.program.host_works[argument]))

    def _link(self, kind: int, rank: int) -> int:
        """Number of a rank's own link."""
        return LINKS_PER_RANK * rank + kind

    def _meeting(self, collective: Collective, stream: int) -> Meeting:
        """One party stands for its symmetric peers: they arrive together. Pipeline ranks come each for themselves."""
        meeting = self.meetings.get((collective, stream))
        if meeting is None:
            parties = self._parties(collective)
            span = placement(self.mesh, collective)
            price = self.cost.collective(collective, span)
            kind = NIC if span.nodes > 1 else NVLINK
            meeting = self.meetings[collective, stream] = Meeting(
                parties=tuple((rank, stream) for rank in parties),
                bytes=price.bytes,
                links=tuple(self._link(kind, rank) for rank in parties) if price.bytes else (),
                latency_ns=price.latency_ns,
                cap_bytes_per_ns=price.cap_bytes_per_s / 1e9,
                level=COLLECTIVE_LEVEL,
            )
        return meeting

    def _copy(self, copy: HostCopy, stream: int) -> Meeting:
        """One party: the rank. Its share of the host's memory stands for the other GPUs of the node, which copy alike."""
        meeting = self.meetings.get((copy, stream))
        if meeting is None:
            way = DOWN if copy.direction == "device_to_host" else UP
            price = self.cost.copy(copy.bytes, copy.direction, copy.pinned)
            meeting = self.meetings[copy, stream] = Meeting(
                parties=((self.rank, stream),),
                bytes=price.bytes,
                links=(self._link(way, self.rank), self._link(HOST_MEMORY, self.rank)),
                latency_ns=price.latency_ns,
                cap_bytes_per_ns=price.cap_bytes_per_s / 1e9,
                level=COPY_LEVEL,
                weight=DOWN_WEIGHT if way == DOWN else 1,
            )
        return meeting

    def _parties(self, collective: Collective) -> tuple[int, ...]:
        if collective.group == "pp":
            return tuple(range(collective.size))
        return (0, self.mesh.degree("pp") - 1) if collective.group == "embedding" else (self.rank,)

    def _transfer(self, transfer: Transfer, stream: int, sends: bool) -> Meeting:
        """A send and its receive, matched by order; they cross the sender's link. Without bytes nothing takes time."""
        key = (transfer.bytes, transfer.sender, transfer.receiver), stream
        meeting = self.meetings.get(key)
        if meeting is None:
            other = OTHER_END[stream]
            ends = (transfer.sender, stream if sends else other), (transfer.receiver, other if sends else stream)
            nodes = {self.mesh.rank({"pp": rank}) // self.mesh.gpus_per_node for rank, _ in ends}
            price = self.cost.send(transfer.bytes, same_node=len(nodes) == 1)
            kind = NVLINK if len(nodes) == 1 else NIC
            meeting = self.meetings[key] = Meeting(
                parties=ends,
                bytes=price.bytes,
                links=(self._link(kind, transfer.sender),) if price.bytes else (),
                latency_ns=price.latency_ns if price.bytes else 0,
                cap_bytes_per_ns=price.cap_bytes_per_s / 1e9,
                level=COLLECTIVE_LEVEL,
            )
        return meeting


def placement(mesh: Mesh, collective: Collective) -> Span:
    """How a collective's ranks lie on the nodes. A post-forward group is the nearest `size` ranks of the shard group."""
    if collective.group == "fsdp_post_forward":
        per_node = min(collective.size, mesh.gpus_per_node)
        return Span(collective.size, -(-collective.size // per_node), per_node, True)
    if collective.group == "embedding":
        same_node = mesh.rank({"pp": mesh.degree("pp") - 1}) < mesh.gpus_per_node
        return Span(2, 1, 2, True) if same_node else Span(2, 2, 1, True)
    if collective.group in REDUCED_OVER_CONTEXT:
        return mesh.span(collective.group, "cp")
    return mesh.span(collective.group)
