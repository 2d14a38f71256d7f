"""Collects what the host issues, as the columns of a `Program`. Knows nothing of tensors or autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.program.kernels import Attention, Collective, Fixed, Gemm, HostCopy, HostWork, Kernel, Memory, Transfer, Work
from sim.program.periods import Position
from sim.program.program import PATH_MASK, PATH_SHIFT, PHASE_SHIFT, Ints, Mark, Mem, Owner, Phase, Program, Row, narrow


class OutOfMemory(Exception):
    """The allocator refused an allocation (the recorder was told which one)."""

    def __init__(self, handle: int, requested_bytes: int) -> None:
        super().__init__(f"allocation {handle} of {requested_bytes} bytes failed")
        self.handle = handle
        self.requested_bytes = requested_bytes


class Operators:
    """Numbers for operator names, shared by all recorders: rules register theirs when they are defined."""

    names: list[str] = []  # noqa: RUF012 (one table for the whole process)
    _numbers: dict[str, int] = {}  # noqa: RUF012

    @classmethod
    def number(cls, name: str) -> int:
        if name not in cls._numbers:
            cls._numbers[name] = len(cls.names)
            cls.names.append(name)
        return cls._numbers[name]


Operators.number("")
_NOT_PHASE = (1 << PHASE_SHIFT) - 1
_BACKWARD = Phase.BACKWARD << PHASE_SHIFT
_LOSS_OWNER, _GRADIENT_OWNER = int(Owner.LOSS), int(Owner.ACTIVATION_GRADIENT)


_RECORDED_EVENTS = (int(Row.RECORD), int(Row.WAIT), int(Row.SYNC))
_ARGUMENT_SHIFT = 12
Places = tuple[Ints, Ints]
"""`where` of rows and of memory events."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was issued between two positions, as arrays. `memory_row` counts from the first row of the recording, the
    events of `rows` from the first that it records (negative where an earlier one is awaited); it records `recorded`."""

    rows: Ints
    event_step: Ints
    """What a row grows by for each event recorded before."""
    row_where: Ints
    memory: Ints
    """Handle << 2 | kind."""
    memory_row: Ints
    memory_where: Ints
    bytes: list[int]
    streams: list[int]
    owners: list[int]
    recorded: int

    @property
    def handles(self) -> int:
        """Allocations made."""
        return len(self.bytes)

    @property
    def memory_handle(self) -> Ints:
        """Per memory event."""
        return self.memory >> 2

    def rebased(self, kind: Ints, first: tuple[int, ...]) -> Recording:
        """Handles counted from `first[kind]` of each event."""
        return replace(self, memory=self.memory - (np.array(first, np.int64)[kind] << 2))


class Recorder:
    """One rank's issue order. `where` is what every row and memory event issued now carries.

    `fail_at`: the number of an allocation that the allocator is known to refuse; it raises OutOfMemory, so that
    what unwinding frees is recorded too.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.where = self.base = 0
        self.stream = 0  # the current one: where kernels and allocations go that name none
        self.events = self.nvme_bytes = 0  # the latter: the most that the rank holds on drives
        self.marks: list[Mark] = []
        self.owners: list[int] = []
        self.default_owner = int(Owner.OTHER)
        self._rows: list[int] = []  # kind | stream << 4 | argument << 12
        self._row_where: list[int] = []
        self._memory: list[int] = []  # kind | handle << 2
        self._memory_row: list[int] = []
        self._memory_where: list[int] = []
        self._bytes: list[int] = []  # per handle
        self._streams: list[int] = []  # per handle
        self._using_streams: list[int] = []  # per record_stream
        self._kernels: dict[Any, int] = {}
        self._kernel_table: list[Kernel] = []
        self._collectives: dict[Collective, int] = {}
        self._host_works: dict[HostWork, int] = {}
        self._transfers: list[Transfer] = []
        self._copies: dict[HostCopy, int] = {}
        self._host_memory: list[tuple[int, int, int]] = []  # rows before; bytes held and used from then on
        self._paths: dict[str, int] = {"": 0}
        self._path_names: list[str] = [""]
        self._chunks: list[tuple[Ints, ...]] = []  # what was issued before the lists above begin
        self._rows_before = 0
        self._events_before = 0

    # -- where -------------------------------------------------------------------------------------------------
    def at(self, phase: Phase, path: str) -> None:
        """Go to a phase and module path."""
        self.base = self.where = phase << PHASE_SHIFT | self._path_number(path) << PATH_SHIFT

    def at_path(self, path: str) -> None:
        """Go to a module path of the present phase."""
        self.base = self.where = self.base >> PHASE_SHIFT << PHASE_SHIFT | self._path_number(path) << PATH_SHIFT

    def _path_number(self, path: str) -> int:
        number = self._paths.get(path)
        if number is None:
            number = self._paths[path] = len(self._path_names)
            self._path_names.append(path)
        return number

    def enter_backward(self, forward_base: int, operator: int) -> None:
        """Go to the backward of what was recorded at `forward_base`."""
        self.base = forward_base & _NOT_PHASE | _BACKWARD
        self.where = self.base | operator
        loss = forward_base >> PHASE_SHIFT == Phase.LOSS
        self.default_owner = _LOSS_OWNER if loss else _GRADIENT_OWNER

    def operator(self, number: int) -> None:
        """Go to an operator of the present phase and path."""
        self.where = self.base | number

    def resume(self, base: int) -> None:
        """Return to where `base` was read."""
        self.base = self.where = base

    # -- memory ------------------------------------------------------------------------------------------------
    def alloc(self, size_bytes: int, stream: int, owner: int) -> int:
        """Ask for `size_bytes`; returns the handle. Raises OutOfMemory for the allocation named by `fail_at`."""
        handle = len(self._bytes)
        self._bytes.append(size_bytes)
        self._streams.append(stream)
        self.owners.append(owner)
        self._memory.append(handle << 2)
        self._memory_row.append(self._rows_before + len(self._rows))
        self._memory_where.append(self.where)
        if handle == self.fail_at:
            raise OutOfMemory(handle, size_bytes)
        return handle

    def free(self, handle: int) -> None:
        self._memory.append(handle << 2 | 1)
        self._memory_row.append(self._rows_before + len(self._rows))
        self._memory_where.append(self.where)

    def record_stream(self, handle: int, stream: int) -> None:
        """Another stream uses the bytes: once freed they wait for what it has been given by then."""
        self._memory.append(handle << 2 | 2)
        self._memory_row.append(self._rows_before + len(self._rows))
        self._memory_where.append(self.where)
        self._using_streams.append(stream)

    def allocation(self, handle: int) -> tuple[int, int, int]:
        """Bytes, stream and owner of an allocation."""
        return self._bytes[handle], self._streams[handle], self.owners[handle]

    # -- rows --------------------------------------------------------------------------------------------------
    def _row(self, kind: Row, stream: int, argument: int) -> None:
        self._rows.append(kind | stream << 4 | argument << 12)
        self._row_where.append(self.where)

    def launch(self, name: str, work: Work, stream: int | None = None) -> None:
        """Launch a kernel; equal kernels share one entry of the table."""
        key = (name, work)
        number = self._kernels.get(key)
        if number is None:
            number = self._kernels[key] = len(self._kernel_table)
            self._kernel_table.append(Kernel(name, work))
        self._rows.append((self.stream if stream is None else stream) << 4 | number << 12)
        self._row_where.append(self.where)

    def memory_bound(self, name: str, family: str, moved_bytes: int, stream: int | None = None) -> None:
        """Launch a kernel whose time is bytes over bandwidth. On tensors without elements nothing is launched."""
        if not moved_bytes:
            return
        key = (name, family, moved_bytes)
        number = self._kernels.get(key)
        if number is None:
            number = self._kernels[key] = len(self._kernel_table)
            self._kernel_table.append(Kernel(name, Memory(family, moved_bytes)))
        self._rows.append((self.stream if stream is None else stream) << 4 | number << 12)
        self._row_where.append(self.where)

    def gemm(self, name: str, m: int, n: int, k: int, dtype: str, batch: int = 1, over_rows: bool = False) -> None:
        key = (name, m, n, k, dtype, batch, over_rows)
        number = self._kernels.get(key)
        if number is None:
            number = self._kernels[key] = len(self._kernel_table)
            self._kernel_table.append(Kernel(name, Gemm(m, n, k, dtype, batch, over_rows=over_rows)))
        self._rows.append(number << 12)
        self._row_where.append(self.where)

    def attention(self, name: str, work: Attention) -> None:
        self.launch(name, work)

    def fixed(self, name: str, duration_ns: int, stream: int | None = None) -> None:
        self.launch(name, Fixed(duration_ns), stream)

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """torch.cuda.stream(stream)."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def record(self, stream: int) -> int:
        """Record an event on a stream; returns its number."""
        number = self.events
        self.events += 1
        self._row(Row.RECORD, stream, number)
        return number

    def wait(self, stream: int, event: int) -> None:
        """The stream waits for the event."""
        self._row(Row.WAIT, stream, event)

    def stream_waits_stream(self, waiting: int, awaited: int) -> None:
        """waiting.wait_stream(awaited)."""
        self.wait(waiting, self.record(awaited))

    def sync(self, event: int) -> None:
        """The host waits for the event."""
        self._row(Row.SYNC, 0, event)

    def collective(self, collective: Collective, stream: int) -> None:
        number = self._collectives.setdefault(collective, len(self._collectives))
        self._row(Row.COLLECTIVE, stream, number)

    def transfer(self, kind: Row, transfer: Transfer, stream: int) -> None:
        """SEND or RECEIVE."""
        self._transfers.append(transfer)
        self._row(kind, stream, len(self._transfers) - 1)

    def copy(self, copy: HostCopy, stream: int) -> None:
        """A copy between device and host; equal copies share one entry of the table. Without bytes nothing is issued."""
        if copy.bytes:
            self._row(Row.COPY, stream, self._copies.setdefault(copy, len(self._copies)))

    def host_memory(self, held_bytes: int, used_bytes: int) -> None:
        """The rank holds and uses so much more (or less) host memory from here on."""
        _, held, used = self._host_memory[-1] if self._host_memory else (0, 0, 0)
        rows = self._rows_before + len(self._rows)
        self._host_memory.append((rows, held + held_bytes, used + used_bytes))

    def host(self, name: str, count: int = 1) -> None:
        """Host time that is no launch."""
        work = HostWork(name, count)
        number = self._host_works.setdefault(work, len(self._host_works))
        self._row(Row.HOST, 0, number)

    def mark(self, name: str) -> None:
        position = self.position()
        self.marks.append(Mark(name, position.rows, position.events))

    # -- again -------------------------------------------------------------------------------------------------
    def position(self) -> Position:
        rows, events = self._rows_before + len(self._rows), self._events_before + len(self._memory)
        return Position(rows, events, len(self._bytes), self.events)

    def since(self, begin: Position) -> Recording:
        """What was issued since `begin`; nothing may have been appended in between."""
        row, event = begin.rows - self._rows_before, begin.events - self._events_before
        memory = np.array(self._memory[event:], np.int64)
        rows = np.array(self._rows[row:], np.int64)
        return Recording(
            rows=rows - (is_event := np.isin(rows & 15, _RECORDED_EVENTS) << _ARGUMENT_SHIFT) * begin.recorded,
            event_step=is_event,
            row_where=np.array(self._row_where[row:], np.int64),
            memory=memory,
            memory_row=np.array(self._memory_row[event:], np.int64) - begin.rows,
            memory_where=np.array(self._memory_where[event:], np.int64),
            bytes=self._bytes[begin.handles :],
            streams=self._streams[begin.handles :],
            owners=self.owners[begin.handles :],
            recorded=self.events - begin.recorded,
        )

    def moved(self, recording: Recording, old_paths: tuple[str, ...], new_paths: tuple[str, ...]) -> Places:
        """Where a recording's rows and memory events are once what is under an old path is under the new one."""
        rows, events = (
            self._moved(where, old_paths, new_paths) for where in (recording.row_where, recording.memory_where)
        )
        return rows, events

    def moved_base(self, base: int, old_paths: tuple[str, ...], new_paths: tuple[str, ...]) -> int:
        """The same for one phase and module path."""
        return int(self._moved(np.array([base], np.int64), old_paths, new_paths)[0])

    def append(self, recording: Recording, first_handle: Ints, places: Places) -> None:
        """Issue a recording again, at other places: `first_handle` per memory event."""
        self._close_chunk()
        memory = recording.memory + (first_handle << 2)
        row_where, memory_where = places
        rows = recording.rows
        if recording.recorded:
            rows = rows + recording.event_step * self.events
            self.events += recording.recorded
        self._chunks.append((rows, row_where, memory, recording.memory_row + self._rows_before, memory_where))
        self._rows_before += len(recording.rows)
        self._events_before += len(memory)
        self._bytes += recording.bytes
        self._streams += recording.streams
        self.owners += recording.owners

    def _moved(self, where: Ints, old_paths: tuple[str, ...], new_paths: tuple[str, ...]) -> Ints:
        if old_paths == new_paths:
            return where
        numbers, index = np.unique(where >> PATH_SHIFT & PATH_MASK, return_inverse=True)
        moved = []
        for number in numbers.tolist():
            name = self._path_names[number]
            roots = ((old, new) for old, new in zip(old_paths, new_paths) if name == old or name.startswith(old + "."))
            old, new = next(roots, ("", ""))
            moved.append(self._path_number(new + name[len(old) :]))
        return where & ~(PATH_MASK << PATH_SHIFT) | np.array(moved, np.int64)[index] << PATH_SHIFT

    def _close_chunk(self) -> None:
        if not self._rows and not self._memory:
            return
        lists = (self._rows, self._row_where, self._memory, self._memory_row, self._memory_where)
        self._chunks.append(tuple(np.array(values, np.int64) for values in lists))
        self._rows_before += len(self._rows)
        self._events_before += len(self._memory)
        for values in lists:
            values.clear()

    # -- result ------------------------------------------------------------------------------------------------
    def program(self, **facts: Any) -> Program:
        self._close_chunk()
        empty: Ints = np.zeros(0, np.int64)
        rows, row_where, memory, memory_row, memory_where = (
            np.concatenate([empty, *columns]) for columns in (zip(*self._chunks) if self._chunks else [()] * 5)
        )
        kind, handle = memory & 3, memory >> 2
        is_alloc = kind == Mem.ALLOC
        sizes, streams = np.array(self._bytes, np.int64), np.array(self._streams, np.int64)
        mem_stream = streams[handle] if len(memory) else streams
        mem_stream[kind == Mem.RECORD_STREAM] = self._using_streams
        return Program(
            kernels=self._kernel_table,
            collectives=list(self._collectives),
            host_works=list(self._host_works),
            paths=self._path_names,
            operators=Operators.names,
            row_kind=narrow(rows & 15, np.int8),
            row_stream=narrow(rows >> 4 & 255, np.int8),
            row_argument=narrow(rows >> 12, np.int32),
            row_where=row_where,
            mem_kind=narrow(kind, np.int8),
            mem_handle=narrow(handle, np.int32),
            mem_bytes=np.where(is_alloc, sizes[handle], 0) if len(memory) else sizes,
            mem_stream=narrow(mem_stream, np.int8),
            mem_row=narrow(memory_row, np.int32),
            mem_where=memory_where,
            owners=narrow(np.array(self.owners, np.int64), np.int8),
            marks=self.marks,
            events=self.events,
            facts=facts,
            transfers=self._transfers,
            copies=list(self._copies),
            nvme_bytes=self.nvme_bytes,
            host_row=np.array([row for row, _, _ in self._host_memory], np.int64),
            host_bytes=np.array([held for _, held, _ in self._host_memory], np.int64),
            host_used=np.array([used for _, _, used in self._host_memory], np.int64),
        )
