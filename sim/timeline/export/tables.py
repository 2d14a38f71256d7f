"""Kernels and allocations as Arrow tables, one row each; columns carry their unit in the name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.program.program import (
    OPERATOR_MASK,
    OWNER_LABELS,
    PATH_MASK,
    PATH_SHIFT,
    PHASE_SHIFT,
    STREAM_NAMES,
    Ints,
    Owner,
    Phase,
    Program,
)
from sim.program.world import Floats
from sim.timeline.clock import memory_clock
from sim.timeline.export.names import row_names
from sim.timeline.lanes import Lanes
from sim.timeline.memory import MemoryTimeline

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = Ints | Floats | npt.NDArray[np.int32]
PHASE_NAMES = tuple(phase.name.lower() for phase in Phase)


def kernel_table(lanes: Lanes) -> pa.Table:
    """Kernels, copies and collectives in issue order: what, where it ran, when it started, how long, when issued."""
    program = lanes.program
    rows = np.flatnonzero(lanes.runs)
    names, number = row_names(program, rows)
    return _table(
        {
            "name": _coded(number, names),
            "stream": _coded(program.row_stream[rows], STREAM_NAMES),
            "start_ns": lanes.start_ns[rows],
            "duration_ns": lanes.end_ns[rows] - lanes.start_ns[rows],
            "issue_ns": lanes.issue_ns[rows],
            **_where(program, program.row_where[rows]),
        }
    )


def memory_table(memory: MemoryTimeline, lanes: Lanes) -> pa.Table:
    """Allocations in issue order. Alive after event e: alloc_event <= e < free_event; a null free_event never came.

    bytes: as asked for; block_bytes: the block it got (these sum to the allocated bytes); times on the issue and on the
    device axis (sim.timeline.clock).
    """
    program, clock = memory.program, memory_clock(memory, lanes)
    handles = np.flatnonzero(memory.born < memory.played)
    born, died = memory.born[handles], memory.died[handles]
    survives = died >= memory.played
    free_event = np.minimum(died, memory.played - 1)

    def freed(values: Numbers) -> pa.Array:
        return _numbers(values, ~survives)

    return _table(
        {
            "handle": handles,
            "bytes": program.mem_bytes[born],
            "block_bytes": memory.block_bytes[born],
            "address": memory.address[born],
            "stream": _coded(program.mem_stream[born], STREAM_NAMES),
            "owner": _coded(program.owners[handles], tuple(OWNER_LABELS[owner] for owner in Owner)),
            **_where(program, program.mem_where[born]),
            "alloc_event": born,
            "free_event": freed(died),
            "alloc_issue_ns": clock.issue_ns[born],
            "free_issue_ns": freed(clock.issue_ns[free_event]),
            "alloc_device_ns": clock.device_ns[born],
            "free_device_ns": freed(clock.device_ns[free_event]),
        }
    )


def _where(program: Program, where: Ints) -> dict[str, pa.Array]:
    """Phase, layer (module path) and op of packed places."""
    return {
        "phase": _coded(where >> PHASE_SHIFT, PHASE_NAMES),
        "layer": _coded((where >> PATH_SHIFT) & PATH_MASK, program.paths),
        "op": _coded(where & OPERATOR_MASK, program.operators),
    }


def _table(columns: dict[str, pa.Array | Numbers]) -> pa.Table:
    import pyarrow as pa

    arrays = [_numbers(column) if isinstance(column, np.ndarray) else column for column in columns.values()]
    return pa.Table.from_arrays(arrays, names=list(columns))


def _numbers(values: Numbers, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An Arrow array over NumPy's buffer. (pyarrow.array would import pandas, which takes longer than all the rest.)"""
    import pyarrow as pa

    present = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [present, pa.py_buffer(np.ascontiguousarray(values))])


def _coded(numbers: Ints, names: Sequence[str]) -> pa.Array:
    """Names by number, stored once each."""
    import pyarrow as pa

    encoded = [name.encode() for name in names]
    ends = np.cumsum([0, *(len(name) for name in encoded)]).astype(np.int32)
    known = pa.StringArray.from_buffers(len(names), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))
    return pa.DictionaryArray.from_arrays(_numbers(numbers.astype(np.int32)), known)
