"""When memory events happen: they take no time of their own, so the rows around them say when.

Two axes. **Issue**: the host's clock, on which the allocator decides. **Device**: when the bytes are in use on the GPU;
an allocation counts from the start of the next compute kernel, a free from the end of the last one before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.program.program import Ints, Mem, Row
from sim.program.world import Floats
from sim.timeline.lanes import Lanes
from sim.timeline.memory import MemoryTimeline, step_ranges


@dataclass(frozen=True, slots=True)
class MemoryClock:
    """Times of the memory events that happened, float64 nanoseconds, never falling in issue order."""

    issue_ns: Floats
    device_ns: Floats


def memory_clock(memory: MemoryTimeline, lanes: Lanes) -> MemoryClock:
    """Both times of every event of `memory`; `lanes` belong to the same program.

    The order of events is kept on both axes, so a curve over either has the exact peak.
    """
    program = memory.program
    rows = program.mem_row[: memory.played]
    before = np.concatenate(([0.0], host_clock(lanes)))
    compute = np.flatnonzero(lanes.computes)
    upcoming = np.searchsorted(compute, rows)
    starts = np.append(lanes.start_ns[compute], lanes.device_end_ns)
    ends = np.concatenate(([0.0], lanes.end_ns[compute]))
    is_alloc = program.mem_kind[: memory.played] == Mem.ALLOC
    device_ns = np.where(is_alloc, starts[upcoming], ends[upcoming])
    return MemoryClock(issue_ns=before[rows], device_ns=np.maximum.accumulate(device_ns))


def host_memory_curve(lanes: Lanes) -> tuple[Floats, Ints]:
    """Bytes in use in host memory and from when on (device axis): from the start of the next copy where they grow, from
    the end of the last one before where they shrink."""
    program = lanes.program
    copies = np.flatnonzero(lanes.is_copy)
    upcoming = np.searchsorted(copies, program.host_row)
    starts = np.append(lanes.start_ns[copies], lanes.device_end_ns)
    ends = np.concatenate(([0.0], np.maximum.accumulate(lanes.end_ns[copies])))
    grows = np.diff(program.host_used, prepend=0) > 0
    times = np.where(grows, starts[upcoming], ends[upcoming])
    return np.maximum.accumulate(times) if len(times) else times, program.host_used


def host_clock(lanes: Lanes) -> Floats:
    """Per row: the host's clock once it has issued the row (for a host row or a sync: once it is through with it)."""
    alone = np.isin(lanes.program.row_kind, (Row.SYNC, Row.HOST))
    return np.maximum.accumulate(np.where(alone, lanes.end_ns, lanes.issue_ns))


def step_windows(lanes: Lanes) -> list[tuple[float, float]]:
    """(start_ns, end_ns) of every step on the device axis: a step begins when all work of the one before has ended."""
    ranges = step_ranges([(m.name, m.rows) for m in lanes.program.marks], len(lanes.start_ns))
    ends = [float(lanes.end_ns[first:last].max()) for first, last in ranges]
    begins = [float(lanes.start_ns[: ranges[0][0]].max(initial=0.0)), *ends]
    return list(zip(begins, ends))
