"""A program whose steady state was recorded twice, with the other periods put in: shifted, as `extend` does with steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.program.kernels import Transfer
from sim.program.periods import Position, Stretch
from sim.program.program import Ints, Mark, Mem, Program
from sim.program.shorter import numbered
from sim.runtime.extend import NotPeriodic


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
    stretches, late = [], Position(0, 0, 0, 0)
    for fold in folds:
        period = fold.end - fold.begin
        stretch = Stretch(fold.oldest, fold.before, period, fold.times + 2, fold.shift).moved(late)
        stretches.append(replace(stretch, earlier=_earlier_alike(program, stretch)))
        late += period * fold.times
    return replace(program, stretches=tuple(stretches))


def _inserted(program: Program, fold: Folded) -> Program:
    begin, end, oldest, times = fold.begin, fold.end, fold.oldest, fold.times
    rows, handles, recorded = end.rows - begin.rows, end.handles - begin.handles, end.recorded - begin.recorded
    part, events = slice(begin.rows, end.rows), slice(begin.events, end.events)
    on_events, moves = numbered(program.row_kind)
    first_transfer, transfers = (int(moves[span].sum()) for span in (slice(begin.rows), part))
    later_events = on_events & (program.row_argument >= oldest.recorded)
    later_events[part] = on_events[part] & (program.row_argument[part] != program.row_argument[_rows_before(fold)])
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

    host = _host_changes(program, begin, end)
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
        host_row=inserted(program.host_row, host, rows),
        host_bytes=inserted(program.host_bytes, host),
        host_used=inserted(program.host_used, host),
    )


def _earlier_alike(program: Program, stretch: Stretch) -> int:
    """Periods before a stretch that issue the same rows."""
    begin, length, recorded = stretch.begin.rows, stretch.period.rows, stretch.period.recorded
    kind = program.row_kind[begin : begin + length]
    on_events, moves = numbered(kind)
    alike = 0
    while (first := begin - (alike + 1) * length) >= 0:
        part = slice(first, first + length)
        change = program.row_argument[begin : begin + length] - program.row_argument[part]
        same = (change == 0) | on_events & (change == recorded * (alike + 1)) | moves
        if not same.all() or not _equal(program, ("row_kind", "row_stream"), part, slice(begin, begin + length)):
            return alike
        alike += 1
    return alike


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
    in_step = end + int(numbered(program.row_kind[fold.end.rows : step_end])[1].sum())
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
    a, b = _rows_before(fold), slice(begin.rows, end.rows)
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
    on_events, moves = numbered(program.row_kind[a])
    argument, handle = program.row_argument[a], program.mem_handle[first]
    later_events = on_events & (argument != program.row_argument[b])
    own = [
        np.array_equal(argument + later_events * recorded + moves * int(moves.sum()), program.row_argument[b]),
        np.array_equal(handle + (handle >= oldest.handles) * handles, program.mem_handle[second]),
        np.array_equal(program.mem_row[first] + rows, program.mem_row[second]),
        int((program.mem_kind[second] == Mem.ALLOC).sum()) == int((program.mem_kind[second] == Mem.FREE).sum()),
        _host_alike(program, fold),
    ]
    if not all(own):
        raise NotPeriodic("a period of the pipeline holds on to something")


def _rows_before(fold: Folded) -> slice:
    """Those of the first of the two periods."""
    return slice(fold.before.rows, fold.begin.rows)


def _host_alike(program: Program, fold: Folded) -> bool:
    """Host memory changes in both periods in the same way, and comes back to what it was."""
    first, second = (_host_changes(program, *ends) for ends in ((fold.before, fold.begin), (fold.begin, fold.end)))
    return np.array_equal(
        program.host_row[first] + (fold.end.rows - fold.begin.rows), program.host_row[second]
    ) and _equal(program, ("host_bytes", "host_used"), first, second)


def _host_changes(program: Program, begin: Position, end: Position) -> slice:
    """Those that are seen in rows begin .. end."""
    return slice(*np.searchsorted(program.host_row, (begin.rows, end.rows), "left").tolist())


def _equal(program: Program, columns: tuple[str, ...], a: slice, b: slice) -> bool:
    return all(np.array_equal(getattr(program, name)[a], getattr(program, name)[b]) for name in columns)
