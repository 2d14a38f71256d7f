"""From a program to the world that the engine plays: kernels get durations, collectives a path, the driver its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sim.cost.model import CostModel
from sim.cost.overlap import LEVELS
from sim.hardware.drives import Drives, usual_drives
from sim.hardware.mesh import Mesh
from sim.program.kernels import Collective, CopyDirection, HostCopy, Transfer
from sim.program.program import (
    COMPUTE,
    RECEIVE_NEXT,
    RECEIVE_PREVIOUS,
    SEND_NEXT,
    SEND_PREVIOUS,
    STREAM_NAMES,
    TENSOR,
    Ints,
    Program,
    Row,
)
from sim.program.world import BURST, DEVICE_SYNC, HOST, MEET, PASSAGE, RECORD, SYNC, WAIT, Bools, Meeting, World
from sim.program.world_builder import NO_ARGUMENT, NO_STREAM, WorldBuilder
from sim.runtime.driver_calls import HostCall
from sim.runtime.groups import placement
from sim.runtime.sections import Cutter, Transfers, section_codes

# Links of a rank; down and up: its host link to and from the host; read and write: its share of the node's drives.
NVLINK, NIC, DOWN, UP, HOST_MEMORY, READ, WRITE = range(7)
LINKS_PER_RANK = 7
OTHER_END = {
    SEND_NEXT: RECEIVE_PREVIOUS,
    RECEIVE_PREVIOUS: SEND_NEXT,
    SEND_PREVIOUS: RECEIVE_NEXT,
    RECEIVE_NEXT: SEND_PREVIOUS,
}
DOWN_WEIGHT = 2
"""Both ways at once, copies to the host get twice what copies from it get: 24-25 and 11-13 GB/s on A100 (COSTS.md 4)."""
WAYS: dict[CopyDirection, int] = {
    "device_to_host": DOWN, "host_to_device": UP, "nvme_to_host": READ, "host_to_nvme": WRITE,
}  # fmt: skip
DRIVE_LATENCY_NS = 100_000
"""Of a request of many blocks to a drive, assumed: beside its bytes it does not matter."""
WorldRow = tuple[int, int, int, int, int]
"""(order, kind, stream, argument, host_ns); the order is that of issue: twice the program's row, and one for the row."""
EVENT_KINDS = np.zeros(len(Row), np.int64)
EVENT_KINDS[[Row.RECORD, Row.WAIT, Row.SYNC]] = RECORD, WAIT, SYNC
COPY_LEVEL, COLLECTIVE_LEVEL = 1, 2  # of contention: kernels beside a copy engine, beside a collective


@dataclass(frozen=True, slots=True)
class Lowered:
    """A world of the simulated ranks. `entries`: per rank, where each row of its program stands among the expanded ones."""

    world: World
    entries: tuple[Ints, ...]


def lower(
    programs: Sequence[Program],
    cost: CostModel,
    mesh: Mesh,
    host_calls: Sequence[Iterable[HostCall]] = (),
    drives: Drives | None = None,
    launch_blocking: bool = False,
) -> Lowered:
    """The programs of all pipeline ranks (one without a pipeline); each stands for all ranks of its symmetric groups.
    `drives`: those of a node; None: the usual ones. `launch_blocking`: the host waits for all that it launches, but for
    transfers between stages, which go in groups.

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
        host.host_to_device_bytes_per_s, host.shared_bytes_per_s, *(drives or usual_drives(mesh.gpus_per_node)).share(mesh),
    )  # fmt: skip
    links = [capacity / 1e9 for capacity in capacities]
    drive_rates = dict(zip((READ, WRITE), links[READ:]))
    builder = WorldBuilder(
        [len(STREAM_NAMES)] * len(programs), kernel_ns, launch_ns, links * len(programs), blocking=launch_blocking
    )
    transfers = [_time_alone(cost, mesh, collective) for collective in blocking]
    cutter = Cutter(
        builder,
        np.array(kernel_ns, np.int64).reshape(len(LEVELS), -1),
        np.array(launch_ns, np.int64),
        cost.host.event_ns,
        Transfers(dict(zip(blocking_numbers.values(), transfers)), COLLECTIVE_LEVEL),
    )
    entries = []
    for rank, program in enumerate(programs):
        numbers = np.array([kernels[kernel] for kernel in program.kernels], np.int64)
        blocking_of_rank = np.array([blocking_numbers[c] for c in program.collectives], np.int64)
        lowering = _Lowering(rank, program, numbers, blocking_of_rank, cost, mesh, builder, cutter, drive_rates)
        entries.append(lowering.run(host_calls[rank] if host_calls else ()))
    return Lowered(builder.build(), tuple(entries))


def _time_alone(cost: CostModel, mesh: Mesh, collective: Collective) -> int:
    """Of a collective on a link that it has to itself."""
    span, forms = placement(mesh, collective), cost.collectives
    price = cost.collective(collective, span)
    link = forms.network_bytes_per_s if span.nodes > 1 else forms.fabric_bytes_per_s
    return round(price.latency_ns + price.bytes / min(price.cap_bytes_per_s, link) * 1e9)


class _Lowering:
    """Walks a rank's rows once, section by section; equal sections are cut into bursts and passages once.

    `kernel_numbers`, `collective_numbers`: the world's number of each kernel of the program, and of the kernel that
    stands for a collective where it blocks compute.
    """

    def __init__(
        self, rank: int, program: Program, kernel_numbers: Ints, collective_numbers: Ints, cost: CostModel, mesh: Mesh,
        builder: WorldBuilder, cutter: Cutter, drive_rates: dict[int, float],
    ) -> None:  # fmt: skip
        self.rank = rank
        self.program = program
        self.kernel_numbers = kernel_numbers
        self.collective_numbers = collective_numbers
        self.cost = cost
        self.mesh = mesh
        self.builder = builder
        self.cutter = cutter
        self.drive_rates = drive_rates
        self.meetings: dict[tuple[object, int], Meeting] = {}
        self.first_event = builder.events(program.events)
        self.rows: list[WorldRow] = []  # all but those about events
        self.awaited: list[int] = []
        """Rows after which the host waits for the device."""

    def run(self, host_calls: Iterable[HostCall]) -> Ints:
        """Returns the rows' places among the expanded entries."""
        program = self.program
        calls_at: dict[int, list[HostCall]] = {}
        for call in host_calls:
            calls_at.setdefault(call.row, []).append(call)
        kinds, streams, arguments = program.row_kind.copy(), program.row_stream, program.row_argument.copy()
        rows = len(kinds)
        launch = kinds == Row.LAUNCH
        arguments[launch] = self.kernel_numbers[arguments[launch]]
        blocking = (kinds == Row.COLLECTIVE) & (streams == COMPUTE)
        arguments[blocking] = self.collective_numbers[arguments[blocking]]
        kinds[blocking] = Row.LAUNCH
        launch |= blocking
        inside = launch
        if self._tensor_link_is_private():
            on_both = (streams == COMPUTE) | (streams == TENSOR)
            inside = launch | on_both & np.isin(kinds, (Row.RECORD, Row.WAIT, Row.COLLECTIVE))
        section = np.where(inside, np.where(streams == TENSOR, COMPUTE, streams), -1)
        starts = np.ones(rows, bool)
        starts[1:] = (section[1:] < 0) | (section[1:] != section[:-1])
        for row in calls_at:
            if row < rows:
                starts[row] = True
        coded = arguments.copy()
        transfers = (kinds == Row.COLLECTIVE) & (streams == TENSOR)
        coded[transfers] = self.collective_numbers[arguments[transfers]]
        codes = section_codes(kinds, streams, coded, starts)
        borders = np.append(np.flatnonzero(starts), rows)
        alone = np.zeros(rows, bool)
        alone[borders[:-1][~inside[borders[:-1]]]] = True
        within = inside[borders[:-1]]
        for first, end in zip(borders[:-1][within].tolist(), borders[1:][within].tolist()):
            self._section(codes[first:end], first, int(streams[first]), alone)
        on_events = alone & np.isin(kinds, (Row.RECORD, Row.WAIT, Row.SYNC))
        others = np.flatnonzero(alone & ~on_events)
        columns = (others, kinds[others], streams[others], arguments[others])
        for row, kind, stream, argument in zip(*(column.tolist() for column in columns)):
            self._row(row, kind, stream, argument)
        inserted = np.zeros(rows + 1, np.int64)
        np.add.at(inserted, np.array(self.awaited, np.int64) + 1, 1)
        for row, calls in calls_at.items():
            for call in calls:
                inserted[row] += self._driver(2 * row, call)
        self._hand_over(np.flatnonzero(on_events))
        return np.arange(rows) + np.cumsum(inserted[:rows])

    def _hand_over(self, events: Ints) -> None:
        """All rows to the builder, in the order in which they are issued; `events`: rows that record or await one."""
        program = self.program
        kinds = program.row_kind[events].astype(np.int64)
        syncs = kinds == Row.SYNC
        order, kind, stream, argument, host_ns = np.array(self.rows, np.int64).reshape(-1, 5).T
        issued = np.argsort(np.concatenate((order, 2 * events + 1)), kind="stable")
        columns = (
            (kind, EVENT_KINDS[kinds]),
            (stream, np.where(syncs, NO_STREAM, program.row_stream[events])),
            (argument, program.row_argument[events].astype(np.int64) + self.first_event),
            (host_ns, np.where(syncs, 0, self.cost.host.event_ns)),
        )
        self.builder.rows(self.rank, *(np.concatenate(column)[issued] for column in columns))

    def _section(self, codes: Ints, first: int, stream: int, alone: Bools) -> None:
        """What it is cut into; rows that stand alone are marked."""
        for piece, number in self.cutter.cut(codes):
            if piece.form == "rows":
                alone[first + piece.first : first + piece.end] = True
            else:
                kind = PASSAGE if piece.form == "passage" else BURST
                self.rows.append((2 * (first + piece.first) + 1, kind, stream, number, 0))
                self._await(first + piece.end - 1)

    def _await(self, row: int) -> None:
        if self.builder.blocking:
            self.rows.append((2 * row + 1, DEVICE_SYNC, NO_STREAM, NO_ARGUMENT, 0))
            self.awaited.append(row)

    def _tensor_link_is_private(self) -> bool:
        """Nothing but what the tensor-parallel stream's own collectives move crosses the link that they use, and kernels
        are on the compute stream alone: what overlaps there concerns nobody else."""
        program, kinds = self.program, self.program.row_kind
        if self.builder.blocking:  # nothing overlaps
            return False
        collectives = kinds == Row.COLLECTIVE
        used: set[tuple[bool, int]] = set()  # (by the tensor-parallel stream, link)
        for stream in np.unique(program.row_stream[collectives]).tolist():
            for number in np.unique(program.row_argument[collectives & (program.row_stream == stream)]).tolist():
                collective = program.collectives[number]
                if stream == TENSOR and len(self._parties(collective)) > 1:
                    return False
                if stream != COMPUTE:
                    kind = NIC if placement(self.mesh, collective).nodes > 1 else NVLINK
                    used.add((stream == TENSOR, kind))
        for sender, receiver in {(transfer.sender, transfer.receiver) for transfer in program.transfers}:
            used.add((False, NVLINK if self._same_node(sender, receiver) else NIC))
        own = {kind for private, kind in used if private}
        alone = not program.row_stream[kinds == Row.LAUNCH].any()
        return bool(own) and alone and not own & {kind for private, kind in used if not private}

    def _driver(self, order: int, call: HostCall) -> int:
        """Returns the number of entries it takes."""
        if call.waits:
            self.rows.append((order, DEVICE_SYNC, NO_STREAM, NO_ARGUMENT, 0))
        self.rows.append((order, HOST, NO_STREAM, NO_ARGUMENT, call.host_ns))
        return 2 if call.waits else 1

    def _row(self, row: int, kind: int, stream: int, argument: int) -> None:
        program, order = self.program, 2 * row + 1
        if kind == Row.LAUNCH:
            self.rows.append((order, BURST, stream, self.builder.template((argument,)), 0))
            self._await(row)
        elif kind == Row.HOST:
            host_ns = self.cost.host_work_ns(program.host_works[argument], self.mesh.gpus_per_node)
            self.rows.append((order, HOST, NO_STREAM, NO_ARGUMENT, host_ns))
        else:
            if kind == Row.COLLECTIVE:
                collective = program.collectives[argument]
                meeting, host_ns = self._meeting(collective, stream), self.cost.collective_host_ns(collective)
            elif kind == Row.COPY:
                meeting, host_ns = self._copy(program.copies[argument], stream), self.cost.host.launch_ns
            else:
                meeting = self._transfer(program.transfers[argument], stream, kind == Row.SEND)
                host_ns = self.cost.host.collective_ns
            number = self.builder.match(meeting, (self.rank, stream))
            self.rows.append((order, MEET, stream, number, host_ns))
            if kind in (Row.COLLECTIVE, Row.COPY):
                self._await(row)

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
            way = WAYS[copy.direction]
            if way in (READ, WRITE):
                return self._drive(copy, stream, way)
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

    def _drive(self, copy: HostCopy, stream: int, way: int) -> Meeting:
        """Between a drive and main memory: no engine of the GPU takes part. The drive alone bounds it."""
        meeting = self.meetings[copy, stream] = Meeting(
            parties=((self.rank, stream),),
            bytes=copy.bytes,
            links=(self._link(way, self.rank), self._link(HOST_MEMORY, self.rank)),
            latency_ns=DRIVE_LATENCY_NS,
            cap_bytes_per_ns=self.drive_rates[way],
        )
        return meeting

    def _parties(self, collective: Collective) -> tuple[int, ...]:
        if collective.group == "pp":
            return tuple(range(collective.size))
        return (0, self.mesh.degree("pp") - 1) if collective.group == "embedding" else (self.rank,)

    def _same_node(self, sender: int, receiver: int) -> bool:
        nodes = {self.mesh.rank({"pp": rank}) // self.mesh.gpus_per_node for rank in (sender, receiver)}
        return len(nodes) == 1

    def _transfer(self, transfer: Transfer, stream: int, sends: bool) -> Meeting:
        """A send and its receive, matched by order; they cross the sender's link. Without bytes nothing takes time."""
        key = (transfer.bytes, transfer.sender, transfer.receiver), stream
        meeting = self.meetings.get(key)
        if meeting is None:
            other = OTHER_END[stream]
            ends = (transfer.sender, stream if sends else other), (transfer.receiver, other if sends else stream)
            same_node = self._same_node(transfer.sender, transfer.receiver)
            price = self.cost.send(transfer.bytes, same_node=same_node)
            kind = NVLINK if same_node else NIC
            meeting = self.meetings[key] = Meeting(
                parties=ends,
                bytes=price.bytes,
                links=(self._link(kind, transfer.sender),) if price.bytes else (),
                latency_ns=price.latency_ns if price.bytes else 0,
                cap_bytes_per_ns=price.cap_bytes_per_s / 1e9,
                level=COLLECTIVE_LEVEL,
            )
        return meeting
