"""What moves between GPU and host in a step, what waits for it, and how much host memory it needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from sim.program.kernels import CPU_MEMORY, CopyDirection
from sim.program.program import (
    COMPUTE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    NVME_READ,
    NVME_WRITE,
    PATH_MASK,
    PATH_SHIFT,
    Phase,
    Program,
    Row,
)
from sim.timeline.lanes import Bools, Lanes
from sim.timeline.memory import step_ranges


@dataclass(frozen=True, slots=True)
class LayerCopies:
    """What one layer saves on its way to the host beside its forward, in the steady step."""

    path: str
    out_ns: float
    forward_ns: float

    @property
    def over_compute(self) -> float:
        """Time of the copies over that of the layer's forward kernels: above 1 they do not hide behind it."""
        return self.out_ns / self.forward_ns if self.forward_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies of the steady step of one rank. Busy: at least one copy of that direction runs.

    exposed_ns: a copy runs and no kernel computes. out_wait_ns, back_wait_ns: the compute stream waits for a tensor that
    leaves on a side stream (to free it), or for one that is fetched.
    """

    out_bytes: int
    back_bytes: int
    out_busy_ns: float
    back_busy_ns: float
    exposed_ns: float
    out_wait_ns: float
    back_wait_ns: float
    written_bytes: int = 0
    """To drives."""
    read_bytes: int = 0
    written_busy_ns: float = 0.0
    read_busy_ns: float = 0.0
    cpu_step_ns: float = 0.0
    """The CPU steps, scales or converts: time of the training thread."""
    drive_wait_ns: float = 0.0
    """The training thread waits for drives."""
    layers: tuple[LayerCopies, ...]
    """Layers from which something leaves during forward."""

    @property
    def out_bytes_per_s(self) -> float:
        """Achieved while a copy runs."""
        return _rate(self.out_bytes, self.out_busy_ns)

    @property
    def back_bytes_per_s(self) -> float:
        """Achieved while a copy runs."""
        return _rate(self.back_bytes, self.back_busy_ns)

    @property
    def written_bytes_per_s(self) -> float:
        """Achieved while drives are written."""
        return _rate(self.written_bytes, self.written_busy_ns)

    @property
    def read_bytes_per_s(self) -> float:
        """Achieved while drives are read."""
        return _rate(self.read_bytes, self.read_busy_ns)


def _rate(moved_bytes: int, busy_ns: float) -> float:
    return moved_bytes / busy_ns * 1e9 if busy_ns else 0.0


def host_peak_bytes(program: Program) -> int:
    """The most host memory that the rank holds for what its GPU does not."""
    return int(program.host_bytes.max(initial=0))


def copies_of(lanes: Lanes) -> Copies | None:
    """Copies of the steady (last) step; None where nothing is copied."""
    program = lanes.program
    ranges = step_ranges([(m.name, m.rows) for m in program.marks], len(lanes.start_ns))
    rows = lanes.in_step(*ranges[-1])
    if not (rows & lanes.is_copy).any():
        return None
    out, back = _moving(lanes, rows, "device_to_host"), _moving(lanes, rows, "host_to_device")
    written, read = _moving(lanes, rows, "host_to_nvme"), _moving(lanes, rows, "nvme_to_host")
    return Copies(
        out_bytes=_bytes(program, out),
        back_bytes=_bytes(program, back),
        out_busy_ns=lanes.busy_ns(out),
        back_busy_ns=lanes.busy_ns(back),
        exposed_ns=lanes.exposed_ns(rows & (lanes.is_copy | lanes.computes)),
        out_wait_ns=_waits_ns(lanes, rows, (DEVICE_TO_HOST,)),
        back_wait_ns=_waits_ns(lanes, rows, (HOST_TO_DEVICE,)),
        written_bytes=_bytes(program, written),
        read_bytes=_bytes(program, read),
        written_busy_ns=lanes.busy_ns(written),
        read_busy_ns=lanes.busy_ns(read),
        cpu_step_ns=_cpu_step_ns(lanes, rows),
        drive_wait_ns=_waits_ns(lanes, rows, (NVME_READ, NVME_WRITE), Row.SYNC),
        layers=_layers(lanes, rows & (lanes.phase == Phase.FORWARD)),
    )


def _layers(lanes: Lanes, rows: Bools) -> tuple[LayerCopies, ...]:
    """Copies and kernels of `rows` (a forward) by the layer in whose module they were issued."""
    program = lanes.program
    names = [match[0] if (match := re.match(r"layers\.\d+", path)) else "" for path in program.paths]
    layers = [name for name in dict.fromkeys(names) if name]
    numbers = {name: number for number, name in enumerate(layers)}
    of_path = np.array([numbers.get(name, -1) for name in names], np.int64)
    of_row = of_path[program.row_where >> PATH_SHIFT & PATH_MASK]
    times = [
        np.bincount(of_row[chosen], (lanes.end_ns - lanes.start_ns)[chosen], len(layers)).tolist()
        for chosen in (rows & (of_row >= 0) & kind for kind in (_moving(lanes, rows, "device_to_host"), lanes.computes))
    ]
    return tuple(LayerCopies(name, out, forward) for name, out, forward in zip(layers, *times) if out)


def _moving(lanes: Lanes, rows: Bools, direction: CopyDirection) -> Bools:
    program = lanes.program
    numbers = [number for number, copy in enumerate(program.copies) if copy.direction == direction]
    chosen: Bools = rows & lanes.is_copy & np.isin(program.row_argument, numbers)
    return chosen


def _bytes(program: Program, rows: Bools) -> int:
    sizes = np.array([copy.bytes for copy in program.copies], np.int64)
    return int(sizes[program.row_argument[rows]].sum())


def _cpu_step_ns(lanes: Lanes, rows: Bools) -> float:
    program = lanes.program
    works = [number for number, work in enumerate(program.host_works) if work.name == CPU_MEMORY]
    steps = rows & (program.row_kind == Row.HOST) & np.isin(program.row_argument, works)
    return float((lanes.end_ns[steps] - lanes.start_ns[steps]).sum())


def _waits_ns(lanes: Lanes, rows: Bools, awaited: tuple[int, ...], kind: Row = Row.WAIT) -> float:
    """Time that the compute stream (SYNC: the host) spends waiting for events of these streams."""
    program = lanes.program
    events = program.row_argument[(program.row_kind == Row.RECORD) & np.isin(program.row_stream, awaited)]
    waits = rows & (program.row_kind == kind) & (program.row_stream == COMPUTE)
    waits &= np.isin(program.row_argument, events)
    return float((lanes.end_ns[waits] - lanes.start_ns[waits]).sum())
