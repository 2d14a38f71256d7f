"""From a program to the world that the engine plays: kernels get durations, collectives a path, the driver its time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sim.cost.model import CostModel
from sim.cost.overlap import LEVELS
from sim.hardware.mesh import Mesh, Span
from sim.program.kernels import Collective, HostCopy
from sim.program.program import STREAM_NAMES, Ints, Program, Row
from sim.program.world import Meeting, World
from sim.program.world_builder import WorldBuilder

NVLINK, NIC, DOWN, UP, HOST_MEMORY = range(5)  # links of the rank; down and up: its host link to and from the host
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
    """A world of one rank. `entry_of_row`: where each row of the program stands among the expanded entries."""

    world: World
    entry_of_row: Ints


def lower(program: Program, cost: CostModel, mesh: Mesh, host_calls: Iterable[HostCall] = ()) -> Lowered:
    """The program of one rank, which stands for all ranks of its symmetric groups."""
    kernel_ns = [[cost.contended_ns(kernel, level) for kernel in program.kernels] for level in LEVELS]
    launch_ns = [cost.launch_host_ns(kernel) for kernel in program.kernels]
    forms, host = cost.collectives, cost.host_links(mesh.gpus_per_node)
    links = (
        forms.fabric_bytes_per_s, forms.network_bytes_per_s, host.device_to_host_bytes_per_s,
        host.host_to_device_bytes_per_s, host.shared_bytes_per_s,
    )  # fmt: skip
    builder = WorldBuilder([len(STREAM_NAMES)], kernel_ns, launch_ns, [link / 1e9 for link in links])
    return _Lowering(program, cost, mesh, builder).run(host_calls)


class _Lowering:
    """Walks the rows once; runs of launches on one stream go to the builder together."""

    def __init__(self, program: Program, cost: CostModel, mesh: Mesh, builder: WorldBuilder) -> None:
        self.program = program
        self.cost = cost
        self.mesh = mesh
        self.builder = builder
        self.meetings: dict[tuple[Collective | HostCopy, int], Meeting] = {}
        self.events: dict[int, int] = {}  # program's number -> world's number
        self.event_ns = cost.host.event_ns

    def run(self, host_calls: Iterable[HostCall]) -> Lowered:
        program = self.program
        calls_at: dict[int, list[HostCall]] = {}
        for call in host_calls:
            calls_at.setdefault(int(program.mem_row[call.event]), []).append(call)
        kinds, streams, arguments = program.row_kind, program.row_stream, program.row_argument
        rows = len(kinds)
        launch = kinds == Row.LAUNCH
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
            if kinds_list[first] == Row.LAUNCH:
                self.builder.launches(0, streams_list[first], arguments_list[first:end])
            else:
                self._row(kinds_list[first], streams_list[first], arguments_list[first])
        for call in calls_at.get(rows, ()):
            self._driver(call)
        return Lowered(self.builder.build(), np.arange(rows) + np.cumsum(inserted[:rows]))

    def _driver(self, call: HostCall) -> int:
        """Returns the number of entries it takes."""
        if call.waits:
            self.builder.device_sync(0)
        self.builder.host(0, call.host_ns)
        return 2 if call.waits else 1

    def _row(self, kind: int, stream: int, argument: int) -> None:
        builder = self.builder
        if kind == Row.RECORD:
            self.events[argument] = builder.record(0, stream, self.event_ns)
        elif kind == Row.WAIT:
            builder.wait(0, stream, self.events[argument], self.event_ns)
        elif kind == Row.SYNC:
            builder.sync(0, self.events[argument])
        elif kind == Row.COLLECTIVE:
            collective = self.program.collectives[argument]
            builder.meet(0, stream, self._meeting(collective, stream), self.cost.collective_host_ns(collective))
        elif kind == Row.COPY:
            builder.meet(0, stream, self._copy(self.program.copies[argument], stream), self.cost.host.launch_ns)
        else:
            builder.host(0, self.cost.host_work_ns(self.program.host_works[argument]))

    def _meeting(self, collective: Collective, stream: int) -> Meeting:
        """One party stands for its symmetric peers: they arrive together."""
        meeting = self.meetings.get((collective, stream))
        if meeting is None:
            span = placement(self.mesh, collective)
            price = self.cost.collective(collective, span)
            meeting = self.meetings[collective, stream] = Meeting(
                parties=((0, stream),),
                bytes=price.bytes,
                links=((NIC if span.nodes > 1 else NVLINK),) if price.bytes else (),
                latency_ns=price.latency_ns,
                cap_bytes_per_ns=price.cap_bytes_per_s / 1e9,
                level=COLLECTIVE_LEVEL,
            )
        return meeting

    def _copy(self, copy: HostCopy, stream: int) -> Meeting:
        """One party: the rank. Its share of the host's memory stands for the other GPUs of the node, which copy alike."""
        meeting = self.meetings.get((copy, stream))
        if meeting is None:
            price = self.cost.copy(copy.bytes, copy.direction, copy.pinned)
            meeting = self.meetings[copy, stream] = Meeting(
                parties=((0, stream),),
                bytes=price.bytes,
                links=(DOWN if copy.direction == "device_to_host" else UP, HOST_MEMORY),
                latency_ns=price.latency_ns,
                cap_bytes_per_ns=price.cap_bytes_per_s / 1e9,
                level=COPY_LEVEL,
                weight=DOWN_WEIGHT if copy.direction == "device_to_host" else 1,
            )
        return meeting


def placement(mesh: Mesh, collective: Collective) -> Span:
    """How a collective's ranks lie on the nodes. A post-forward group is the nearest `size` ranks of the shard group."""
    if collective.group == "fsdp_post_forward":
        per_node = min(collective.size, mesh.gpus_per_node)
        return Span(collective.size, -(-collective.size // per_node), per_node, True)
    return mesh.span(collective.group)
