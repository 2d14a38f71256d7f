"""Collects what the host issues, as the columns of a `Program`. Knows nothing of tensors or autograd."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.program.kernels import Attention, Collective, Fixed, Gemm, HostWork, Kernel, Memory, Work
from sim.program.program import PATH_SHIFT, PHASE_SHIFT, Mark, Mem, Owner, Phase, Program, Row


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


class Recorder:
    """One rank's issue order. `where` is what every row and memory event issued now carries.

    `fail_at`: the number of an allocation that the allocator is known to refuse; it raises OutOfMemory, so that
    what unwinding frees is recorded too.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.where = 0
        self.base = 0
        self.events = 0
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
        self._kernels: dict[Any, int] = {}
        self._kernel_table: list[Kernel] = []
        self._collectives: list[Collective] = []
        self._host_works: dict[HostWork, int] = {}
        self._paths: dict[str, int] = {"": 0}

    # -- where -------------------------------------------------------------------------------------------------
    def at(self, phase: Phase, path: str) -> None:
        """Go to a phase and module path."""
        number = self._paths.setdefault(path, len(self._paths))
        self.base = self.where = phase << PHASE_SHIFT | number << PATH_SHIFT

    def at_path(self, path: str) -> None:
        """Go to a module path of the present phase."""
        number = self._paths.setdefault(path, len(self._paths))
        self.base = self.where = self.base >> PHASE_SHIFT << PHASE_SHIFT | number << PATH_SHIFT

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
        self._memory_row.append(len(self._rows))
        self._memory_where.append(self.where)
        if handle == self.fail_at:
            raise OutOfMemory(handle, size_bytes)
        return handle

    def free(self, handle: int) -> None:
        self._memory.append(handle << 2 | 1)
        self._memory_row.append(len(self._rows))
        self._memory_where.append(self.where)

    # -- rows --------------------------------------------------------------------------------------------------
    def _row(self, kind: Row, stream: int, argument: int) -> None:
        self._rows.append(kind | stream << 4 | argument << 12)
        self._row_where.append(self.where)

    def launch(self, name: str, work: Work, stream: int = 0) -> None:
        """Launch a kernel; equal kernels share one entry of the table."""
        key = (name, work)
        number = self._kernels.get(key)
        if number is None:
            number = self._kernels[key] = len(self._kernel_table)
            self._kernel_table.append(Kernel(name, work))
        self._rows.append(stream << 4 | number << 12)
        self._row_where.append(self.where)

    def memory_bound(self, name: str, family: str, moved_bytes: int, stream: int = 0) -> None:
        """Launch a kernel whose time is bytes over bandwidth. On tensors without elements nothing is launched."""
        if not moved_bytes:
            return
        key = (name, family, moved_bytes)
        number = self._kernels.get(key)
        if number is None:
            number = self._kernels[key] = len(self._kernel_table)
            self._kernel_table.append(Kernel(name, Memory(family, moved_bytes)))
        self._rows.append(stream << 4 | number << 12)
        self._row_where.append(self.where)

    def gemm(self, name: str, m: int, n: int, k: int, dtype: str, batch: int = 1) -> None:
        key = (name, m, n, k, dtype, batch)
        number = self._kernels.get(key)
        if number is None:
            number = self._kernels[key] = len(self._kernel_table)
            self._kernel_table.append(Kernel(name, Gemm(m, n, k, dtype, batch)))
        self._rows.append(number << 12)
        self._row_where.append(self.where)

    def attention(self, name: str, work: Attention) -> None:
        self.launch(name, work)

    def fixed(self, name: str, duration_ns: int, stream: int = 0) -> None:
        self.launch(name, Fixed(duration_ns), stream)

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
        self._collectives.append(collective)
        self._row(Row.COLLECTIVE, stream, len(self._collectives) - 1)

    def host(self, name: str, count: int = 1) -> None:
        """Host time that is no launch."""
        work = HostWork(name, count)
        number = self._host_works.setdefault(work, len(self._host_works))
        self._row(Row.HOST, 0, number)

    def mark(self, name: str) -> None:
        self.marks.append(Mark(name, len(self._rows), len(self._memory)))

    # -- result ------------------------------------------------------------------------------------------------
    def program(self, **facts: Any) -> Program:
        rows = np.array(self._rows, np.int64)
        memory = np.array(self._memory, np.int64)
        kind, handle = memory & 3, memory >> 2
        is_alloc = kind == Mem.ALLOC
        sizes, streams = np.array(self._bytes, np.int64), np.array(self._streams, np.int64)
        return Program(
            kernels=self._kernel_table,
            collectives=self._collectives,
            host_works=list(self._host_works),
            paths=list(self._paths),
            operators=Operators.names,
            row_kind=rows & 15,
            row_stream=rows >> 4 & 255,
            row_argument=rows >> 12,
            row_where=np.array(self._row_where, np.int64),
            mem_kind=kind,
            mem_handle=handle,
            mem_bytes=np.where(is_alloc, sizes[handle], 0) if len(memory) else sizes,
            mem_stream=streams[handle] if len(memory) else streams,
            mem_row=np.array(self._memory_row, np.int64),
            mem_where=np.array(self._memory_where, np.int64),
            owners=np.array(self.owners, np.int64),
            marks=self.marks,
            events=self.events,
            facts=facts,
        )
