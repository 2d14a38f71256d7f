"""A program whose steady state was recorded twice, with the other periods put in: shifted, as `extend` does with steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.program.kernels import Transfer
from sim.program.program import Ints, Mark, Mem, Program, Row
from sim.program.world import Bools
from sim.runtime.extend import NotPeriodic
from sim.runtime.recorder import Position


@dataclass(frozen=True, slots=True)
class Folded:
    """Where a step of the script was folded: `before` .. `begin` and `begin` .. `end` are two periods, `times` more are
    left out, each `shift` micro-batches later. Of what lives at `before`, that which was made after `oldest` belongs to
    micro-batches on their way and is another in every period; the rest stays."""

    step: int
    oldest: Position
    before: Position
    begin: Position
    end: Position
    times: int
    shift: int


def unfold(program: Program, folds: Sequence[Folded]) -> Program:
    """The program with all that was left out. Raises NotPeriodic where two periods differ."""
    for fold in reversed(folds):  # a later one does not move an earlier one's place
        _check_alike(program, fold)
        program = _inserted(program, fold)
    return program


def _inserted(program: Program, fold: Folded) -> Program:
    begin, end, oldest, times = fold.begin, fold.end, fold.oldest, fold.times
    rows, handles, recorded = end.rows - begin.rows, end.handles - begin.handles, end.recorded - begin.recorded
    part, events = slice(begin.rows, end.rows), slice(begin.events, end.events)
    on_events, moves = _numbered(program.row_kind)
    first_transfer, transfers = (int(moves[span].sum()) for span in (slice(begin.rows), part))
    later_events = on_events & (program.row_argument >= oldest.recorded)
    row_step = later_events * recorded + moves * transfers
    handle_step = (program.mem_handle >= oldest.handles) * handles

    def inserted(column: Ints, span: slice, step: Ints | int = 0) -> Ints:
        """`times` copies of a part behind it, the n-th `n * step` later; what follows `times * step` later."""
        length, end = span.stop - span.start, span.stop
        made = np.empty(len(column) + times * length, column.dtype)
        made[:end] = column[:end]
        copies, rest = made[end : end + times * length].reshape(times, length), made[end + times * length :]
        copies[:] = column[span]
        rest[:] = column[end:]
        if isinstance(step, int):
            copies += (step * np.arange(1, times + 1, dtype=column.dtype))[:, None]
            rest += step * times
        else:
            step = step.astype(column.dtype)
            copies += np.arange(1, times + 1, dtype=column.dtype)[:, None] * step[span]
            rest += times * step[end:]
        return made

    host_row = program.host_row + (program.host_row >= end.rows) * rows * times
    return replace(
        program,
        row_kind=inserted(program.row_kind, part),
        row_stream=inserted(program.row_stream, part),
        row_argument=inserted(program.row_argument, part, row_step),
        row_where=inserted(program.row_where, part),
        mem_kind=inserted(program.mem_kind, events),
        mem_handle=inserted(program.mem_handle, events, handle_step),
        mem_bytes=inserted(program.mem_bytes, events),
        mem_stream=inserted(program.mem_stream, events),
        mem_row=inserted(program.mem_row, events, rows),
        mem_where=inserted(program.mem_where, events),
        owners=inserted(program.owners, slice(begin.handles, end.handles)),
        marks=_marks(program.marks, fold),
        events=program.events + recorded * times,
        transfers=_transfers(program, fold, first_transfer, transfers),
        host_row=host_row,
    )


def _numbered(kinds: Ints) -> tuple[Bools, Bools]:
    """Rows whose argument is an event's, and a transfer's number."""
    return np.isin(kinds, (Row.RECORD, Row.WAIT, Row.SYNC)), np.isin(kinds, (Row.SEND, Row.RECEIVE))


def _marks(marks: list[Mark], fold: Folded) -> list[Mark]:
    """Ends of forwards and backwards carry the micro-batch in their name."""
    begin, end = fold.begin, fold.end
    rows, events = end.rows - begin.rows, end.events - begin.events
    first = next((n for n, mark in enumerate(marks) if mark.rows > begin.rows), len(marks))
    last = next((n for n, mark in enumerate(marks) if mark.rows > end.rows), len(marks))
    made = marks[:last]
    for n in range(1, fold.times + 1):
        made += [_moved(mark, fold, rows * n, events * n, n) for mark in marks[first:last]]
    return made + [_moved(mark, fold, rows * fold.times, events * fold.times, fold.times) for mark in marks[last:]]


def _moved(mark: Mark, fold: Folded, rows: int, events: int, periods: int) -> Mark:
    name, own = mark.name, f"s{fold.step}."
    part = name.removeprefix(own)
    if name.startswith(own) and part[:3] in ("fwd", "bwd"):
        name = f"{own}{part[:3]}{int(part[3:]) + periods * fold.shift}"
    return Mark(name, mark.rows + rows, mark.memory_events + events)


def _transfers(program: Program, fold: Folded, first: int, count: int) -> list[Transfer]:
    """The transfers with those of the added periods; the rest of this step's have later micro-batches."""
    known, end = program.transfers, first + count
    step_end = next(mark.rows for mark in program.marks if mark.name == f"s{fold.step}.end")
    in_step = end + int(_numbered(program.row_kind[fold.end.rows : step_end])[1].sum())
    made = known[:end]
    for n in range(1, fold.times + 1):
        made += [_later(transfer, n * fold.shift) for transfer in known[first:end]]
    made += [_later(transfer, fold.times * fold.shift) for transfer in known[end:in_step]]
    return made + known[in_step:]


def _later(transfer: Transfer, micro_batches: int) -> Transfer:
    return Transfer(
        transfer.bytes, transfer.sender, transfer.receiver, transfer.stage, transfer.micro_batch + micro_batches,
        transfer.backward,
    )  # fmt: skip


def _check_alike(program: Program, fold: Folded) -> None:
    """Both periods must issue the same, each with what is its own or on its way, and free as much as they allocate."""
    before, begin, end, oldest = fold.before, fold.begin, fold.end, fold.oldest
    a, b = slice(before.rows, begin.rows), slice(begin.rows, end.rows)
    first, second = slice(before.events, begin.events), slice(begin.events, end.events)
    shifts = [end[n] - begin[n] for n in range(len(end))]
    same = [
        shifts == [begin[n] - before[n] for n in range(len(end))],
        _equal(program, ("row_kind", "row_stream", "row_where"), a, b),
        _equal(program, ("mem_kind", "mem_bytes", "mem_stream", "mem_where"), first, second),
        np.array_equal(program.owners[before.handles : begin.handles], program.owners[begin.handles : end.handles]),
    ]
    if not all(same):
        raise NotPeriodic("two periods of the pipeline differ")
    rows, handles, recorded = end.rows - begin.rows, end.handles - begin.handles, end.recorded - begin.recorded
    on_events, moves = _numbered(program.row_kind[a])
    argument, handle = program.row_argument[a], program.mem_handle[first]
    own = [
        np.array_equal(argument + on_events * recorded + moves * int(moves.sum()), program.row_argument[b]),
        np.array_equal(handle + (handle >= oldest.handles) * handles, program.mem_handle[second]),
        np.array_equal(program.mem_row[first] + rows, program.mem_row[second]),
        (argument[on_events] >= oldest.recorded).all(),
        int((program.mem_kind[second] == Mem.ALLOC).sum()) == int((program.mem_kind[second] == Mem.FREE).sum()),
        not ((program.host_row > before.rows) & (program.host_row <= end.rows)).any(),
    ]
    if not all(own):
        raise NotPeriodic("a period of the pipeline holds on to something")


def _equal(program: Program, columns: tuple[str, ...], a: slice, b: slice) -> bool:
    return all(np.array_equal(getattr(program, name)[a], getattr(program, name)[b]) for name in columns)
