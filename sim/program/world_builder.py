"""Collects rows into a `World`: joins launches into bursts, shares equal templates, matches meetings by order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim.program.passage import Passage
from sim.program.program import Ints
from sim.program.world import (
    BURST,
    DEVICE_SYNC,
    HOST,
    LAUNCH_QUEUE_ROWS,
    MEET,
    PASSAGE,
    RECORD,
    SYNC,
    WAIT,
    Burst,
    Meeting,
    Party,
    RankProgram,
    World,
    WorldError,
    largest_burst,
)

NO_STREAM, NO_ARGUMENT = -1, -1


@dataclass(slots=True)
class _Rank:
    """The rows of one rank so far, and the run of launches that the next launch may still join."""

    streams: int
    rows: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    run_stream: int = NO_STREAM
    run_scale: float = 1.0
    columns: tuple[Ints, Ints, Ints, Ints] | None = None
    """Rows given at once instead."""


class WorldBuilder:
    """Kernels are numbers into two tables given once: `kernel_ns` [levels, kernels] and `launch_ns` [kernels].

    Every method appends to the program of one rank, in host order. Neighbouring launches on one stream become bursts,
    one row of the world each; every other call is one row. Expanded (`sim.timeline.expand`), a rank has one entry per
    launch and one per other call, in the order of the calls.
    """

    def __init__(
        self,
        streams: Sequence[int],
        kernel_ns: npt.ArrayLike,
        launch_ns: npt.ArrayLike,
        capacity_bytes_per_ns: Sequence[float] = (),
        queue_rows: int = LAUNCH_QUEUE_ROWS,
        blocking: bool = False,
    ) -> None:
        """`streams` counts the streams of each rank. Times are whole nanoseconds; raises `WorldError` otherwise. `blocking`:
        the host waits for each kernel of a burst but the last."""
        self._kernel_ns, self._launch_ns = _whole(kernel_ns, "kernel_ns"), _whole(launch_ns, "launch_ns")
        if self._kernel_ns.ndim != 2 or self._kernel_ns.shape[1:] != self._launch_ns.shape:
            raise WorldError([f"kernel_ns {self._kernel_ns.shape} and launch_ns {self._launch_ns.shape} do not match"])
        self._capacity = list(capacity_bytes_per_ns)
        self.queue_rows = queue_rows
        self.blocking = blocking
        self._ranks = [_Rank(count) for count in streams]
        self._templates: dict[tuple[int, ...], int] = {}
        self._meetings: list[Meeting] = []
        self._passages: list[Passage] = []
        self._events = 0
        self._matched: dict[Hashable, tuple[list[int], dict[Party, int]]] = {}
        """Per communicator: its meetings in order, and how many of them a party has posted."""
        self._problems: list[str] = []

    def launches(self, rank: int, stream: int, kernels: Iterable[int], scale: float = 1.0) -> None:
        """Launch kernels one after the other. They join the launches before them if stream and scale are the same."""
        to = self._ranks[rank]
        if to.run_stream != stream or to.run_scale != scale:
            self._close_run(to)
            to.run_stream, to.run_scale = stream, scale
        to.run.extend(kernels)

    def template(self, kernels: tuple[int, ...]) -> int:
        """Number of a burst of these kernels, to be played as often as it occurs."""
        return self._templates.setdefault(kernels, len(self._templates))

    def end_burst(self, rank: int) -> None:
        """Keep the launches so far apart from those that follow, so that equal layers share a template."""
        self._close_run(self._ranks[rank])

    def record(self, rank: int, stream: int, host_ns: int = 0) -> int:
        """Record a new event on a stream; returns its number."""
        self._append(rank, RECORD, stream, self._events, host_ns)
        self._events += 1
        return self._events - 1

    def wait(self, rank: int, stream: int, event: int, host_ns: int = 0) -> None:
        """Let a stream wait for an event of the same rank."""
        self._append(rank, WAIT, stream, event, host_ns)

    def sync(self, rank: int, event: int, host_ns: int = 0) -> None:
        """Let the host wait for an event."""
        self._append(rank, SYNC, NO_STREAM, event, host_ns)

    def device_sync(self, rank: int, host_ns: int = 0) -> None:
        """Let the host wait until every stream of its rank has finished what was issued."""
        self._append(rank, DEVICE_SYNC, NO_STREAM, NO_ARGUMENT, host_ns)

    def host(self, rank: int, host_ns: int) -> None:
        """Host time that issues nothing."""
        self._append(rank, HOST, NO_STREAM, NO_ARGUMENT, host_ns)

    def meet(self, rank: int, stream: int, meeting: Meeting, host_ns: int = 0, communicator: Hashable = None) -> int:
        """Post a meeting as one of its parties; returns its number.

        The n-th posts of all parties to the same parties over the same communicator are one meeting, which they must
        describe equally. A `Meeting` is a value: post one object as often as it occurs.
        """
        number = self.match(meeting, (rank, stream), communicator)
        self._append(rank, MEET, stream, number, host_ns)
        return number

    def passage(self, passage: Passage) -> int:
        """Add a passage to the world; returns its number, to be played as often as it occurs."""
        self._passages.append(passage)
        return len(self._passages) - 1

    def passes(self, rank: int, stream: int, number: int) -> None:
        """Issue a passage whose main stream is `stream`."""
        self._append(rank, PASSAGE, stream, number, 0)

    def events(self, count: int) -> int:
        """Reserve so many events for rows given as columns; returns the first number."""
        self._events += count
        return self._events - count

    def rows(self, rank: int, kind: Ints, stream: Ints, argument: Ints, host_ns: Ints) -> None:
        """All rows of a rank at once, as columns: templates, meetings and events by their numbers."""
        self._ranks[rank].columns = (kind, stream, argument, host_ns)

    def build(self) -> World:
        """The world, validated; raises `WorldError` with every problem."""
        for rank in self._ranks:
            self._close_run(rank)
        if self._problems:
            raise WorldError(self._problems)
        world = World(
            ranks=[_columns(rank) for rank in self._ranks],
            bursts=[self._burst(kernels) for kernels in self._templates],
            meetings=self._meetings,
            capacity_bytes_per_ns=self._capacity,
            events=self._events,
            levels=len(self._kernel_ns),
            queue_rows=self.queue_rows,
            passages=self._passages,
        )
        world.validate()
        return world

    def _append(self, rank: int, kind: int, stream: int, argument: int, host_ns: int) -> None:
        to = self._ranks[rank]
        if to.run:
            self._close_run(to)
        to.rows.append((kind, stream, argument, host_ns, 1.0))

    def _close_run(self, rank: _Rank) -> None:
        size = largest_burst(self.queue_rows)
        for first in range(0, len(rank.run), size):
            kernels = tuple(rank.run[first : first + size])
            rank.rows.append((BURST, rank.run_stream, self.template(kernels), 0, rank.run_scale))
        rank.run.clear()

    def _burst(self, kernels: tuple[int, ...]) -> Burst:
        numbers = list(kernels)
        host_ns, duration_ns = self._launch_ns[numbers], np.ascontiguousarray(self._kernel_ns[:, numbers])
        if self.blocking:
            host_ns[1:] += duration_ns[0, :-1]
        return Burst(host_ns, duration_ns)

    def match(self, meeting: Meeting, party: Party, communicator: Hashable = None) -> int:
        """Number of the meeting that a party posts next over this communicator."""
        matched, turns = self._matched.setdefault((communicator, meeting.parties), ([], {}))
        turn = turns.get(party, 0)
        turns[party] = turn + 1
        if turn == len(matched):
            matched.append(len(self._meetings))
            self._meetings.append(meeting)
        number = matched[turn]
        if self._meetings[number] is not meeting and self._meetings[number] != meeting:
            self._problems.append(f"meeting {number}: rank {party[0]} posts {meeting}, others {self._meetings[number]}")
        return number


def _whole(values: npt.ArrayLike, name: str) -> Ints:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise WorldError([f"{name}: whole nanoseconds are expected, not {array.dtype}"])
    return array.astype(np.int64)


def _columns(rank: _Rank) -> RankProgram:
    if rank.columns is not None:
        return RankProgram(rank.streams, *rank.columns, scale=np.ones(len(rank.columns[0])))
    kind, stream, argument, host_ns, scale = zip(*rank.rows) if rank.rows else ((),) * 5
    return RankProgram(
        streams=rank.streams,
        kind=np.array(kind, np.int64),
        stream=np.array(stream, np.int64),
        argument=np.array(argument, np.int64),
        host_ns=np.array(host_ns, np.int64),
        scale=np.array(scale, np.float64),
    )
