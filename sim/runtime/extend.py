"""More steps of the same: a later step issues what the last recorded one issued, with its own handles and events.

From the third step on nothing in the script changes any more: states exist, shapes are fixed. So a fourth step is the
third one shifted, by as many handles and events as a step makes; what the third takes over from the second (gradients
that it zeroes, tokens that it replaces), the fourth takes over from the third.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sim.program.periods import Position, Stretch
from sim.program.program import Ints, Mark, Mem, Program, Row, narrow

RECORDED_STEPS = 3


class NotPeriodic(Exception):
    """The last two recorded steps differ: they cannot be repeated."""


def extend(program: Program, steps: int) -> Program:
    """The program with `steps` steps in all, from one with at least three. Raises NotPeriodic."""
    ends = [mark for mark in program.marks if mark.name.endswith(".end")]
    recorded = len(ends)
    if steps <= recorded:
        return program
    if recorded < RECORDED_STEPS:
        raise NotPeriodic("at least three steps must be recorded")
    third, second = ends[-1], ends[-2]
    rows, events = slice(second.rows, third.rows), slice(second.memory_events, third.memory_events)
    before = ends[-3]
    born = program.mem_kind == Mem.ALLOC
    handles = [int(born[: mark.memory_events].sum()) for mark in (before, second, third)]
    per_step = handles[2] - handles[1]
    stream_events = [_events_before(program, mark.rows) for mark in (before, second, third)]
    events_per_step = stream_events[2] - stream_events[1]
    _check_alike(program, before, second, third, handles)
    extra = range(1, steps - recorded + 1)
    handle, argument = program.mem_handle[events], program.row_argument[rows]
    moves = handle >= handles[0]
    numbered = np.isin(program.row_kind[rows], (Row.RECORD, Row.WAIT, Row.SYNC)) & (argument >= stream_events[0])
    row_count, event_count = third.rows - second.rows, third.memory_events - second.memory_events
    step = Position(row_count, event_count, per_step, events_per_step)

    host = slice(*np.searchsorted(program.host_row, (second.rows, third.rows)).tolist())

    def repeated(column: Ints, part: slice) -> Ints:
        return np.concatenate([column, *(column[part] for _ in extra)])

    return replace(
        program,
        row_kind=repeated(program.row_kind, rows),
        row_stream=repeated(program.row_stream, rows),
        row_argument=narrow(
            np.concatenate([program.row_argument, *(argument + numbered * events_per_step * n for n in extra)]),
            np.int32,
        ),
        row_where=repeated(program.row_where, rows),
        mem_kind=repeated(program.mem_kind, events),
        mem_handle=narrow(
            np.concatenate([program.mem_handle, *(handle + moves * per_step * n for n in extra)]), np.int32
        ),
        mem_bytes=repeated(program.mem_bytes, events),
        mem_stream=repeated(program.mem_stream, events),
        mem_row=np.concatenate([program.mem_row, *(program.mem_row[events] + row_count * n for n in extra)]),
        mem_where=repeated(program.mem_where, events),
        owners=np.concatenate([program.owners, *(program.owners[handles[1] : handles[2]] for _ in extra)]),
        marks=[*program.marks, *_later_marks(program.marks, second, extra, recorded, row_count, event_count)],
        events=program.events + events_per_step * len(extra),
        host_row=np.concatenate([program.host_row, *(program.host_row[host] + row_count * n for n in extra)]),
        host_bytes=repeated(program.host_bytes, host),
        host_used=repeated(program.host_used, host),
        stretches=(*program.stretches, *_later_stretches(program, rows, extra, step)),
    )


def cut(program: Program, steps: int) -> Program:
    """The first `steps` steps of a program, in memory of their own."""
    end = next(mark for mark in program.marks if mark.name == f"s{steps - 1}.end")
    rows, events = end.rows, end.memory_events
    handles = int((program.mem_kind[:events] == Mem.ALLOC).sum())
    host = int(np.searchsorted(program.host_row, rows))
    return replace(
        program,
        row_kind=program.row_kind[:rows].copy(),
        row_stream=program.row_stream[:rows].copy(),
        row_argument=program.row_argument[:rows].copy(),
        row_where=program.row_where[:rows].copy(),
        mem_kind=program.mem_kind[:events].copy(),
        mem_handle=program.mem_handle[:events].copy(),
        mem_bytes=program.mem_bytes[:events].copy(),
        mem_stream=program.mem_stream[:events].copy(),
        mem_row=program.mem_row[:events].copy(),
        mem_where=program.mem_where[:events].copy(),
        owners=program.owners[:handles].copy(),
        marks=program.marks[: program.marks.index(end) + 1],
        events=_events_before(program, rows),
        host_row=program.host_row[:host].copy(),
        host_bytes=program.host_bytes[:host].copy(),
        host_used=program.host_used[:host].copy(),
        stretches=tuple(stretch for stretch in program.stretches if stretch.end_row <= rows),
    )


def _events_before(program: Program, rows: int) -> int:
    """Stream events recorded among the first rows."""
    return int((program.row_kind[:rows] == Row.RECORD).sum())


def _check_alike(program: Program, before: Mark, second: Mark, third: Mark, handles: list[int]) -> None:
    """The last two steps must issue the same, with handles of their own step or the one before.

    `handles`: allocations before each of the marks. (What the second takes over from the first has no fixed distance:
    the first step also makes what lives on.)
    """
    a, b = slice(before.memory_events, second.memory_events), slice(second.memory_events, third.memory_events)
    same = [
        (second.rows - before.rows) == (third.rows - second.rows),
        _host_ends_alike(program, second, third),
        *(
            np.array_equal(column[a], column[b])
            for column in (program.mem_kind, program.mem_bytes, program.mem_stream, program.mem_where)
        ),
    ]
    if not all(same):
        raise NotPeriodic("the last two recorded steps differ")
    earlier, later = program.mem_handle[a], program.mem_handle[b]
    own = later >= handles[1]
    alike = np.array_equal(earlier[own] + handles[2] - handles[1], later[own])
    if not alike or (later < handles[0]).any() or (earlier[~own] >= handles[0]).any():
        raise NotPeriodic("a step holds on to something older than the step before")


def _host_ends_alike(program: Program, second: Mark, third: Mark) -> bool:
    """Host memory is the same before and after the last step."""
    changes = np.searchsorted(program.host_row, (second.rows, third.rows))
    held, used = (np.concatenate(([0], column))[changes] for column in (program.host_bytes, program.host_used))
    return bool(held[0] == held[1] and used[0] == used[1])


def _later_stretches(program: Program, rows: slice, extra: range, step: Position) -> list[Stretch]:
    """Those of the added steps: all of a step's own numbers are later, and what it takes over from the step before."""
    known = [stretch for stretch in program.stretches if rows.start <= stretch.begin.rows < rows.stop]
    return [stretch.moved(step * n) for n in extra for stretch in known]


def _later_marks(
    marks: list[Mark], second: Mark, extra: range, recorded: int, row_count: int, event_count: int
) -> list[Mark]:
    """Marks of the added steps, named s3.fwd0 and so on."""
    later = []
    for n in extra:
        for mark in marks[marks.index(second) + 1 :]:
            name = f"s{recorded - 1 + n}.{mark.name.partition('.')[2]}"
            later.append(Mark(name, mark.rows + row_count * n, mark.memory_events + event_count * n))
    return later
