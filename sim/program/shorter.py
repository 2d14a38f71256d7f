"""A program's rows without some of its equal periods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.program.periods import Stretch
from sim.program.program import Ints, Program, Row, narrow
from sim.program.world import Bools


@dataclass(frozen=True, slots=True)
class Cut:
    """`times` periods of a stretch from number `first` on, which may be one of the `earlier` (below 0)."""

    stretch: Stretch
    first: int
    times: int

    @property
    def rows(self) -> slice:
        length = self.stretch.period.rows
        begin = self.stretch.begin.rows + self.first * length
        return slice(begin, begin + self.times * length)

    @property
    def length(self) -> int:
        """Rows."""
        return self.times * self.stretch.period.rows


def shorter(program: Program, cuts: Sequence[Cut]) -> Program:
    """The rows without some periods. Memory events, marks and transfers stay those of the whole program."""
    kept = np.ones(len(program.row_kind), bool)
    for cut in cuts:
        kept[cut.rows] = False
    at = np.flatnonzero(kept)
    kind, argument = program.row_kind[at], program.row_argument[at]
    on_events, _ = numbered(kind)
    less: Ints = np.zeros(len(at), np.int64)
    for cut in cuts:
        recorded = cut.stretch.period.recorded
        own = argument >= cut.stretch.begin.recorded - cut.stretch.earlier * recorded
        less[on_events & own & (at >= cut.rows.stop)] += cut.times * recorded
    return replace(
        program,
        row_kind=kind,
        row_stream=program.row_stream[at],
        row_argument=narrow(np.maximum(argument - less, 0), np.int32),  # 0: for one of long before, fired as those
        row_where=program.row_where[at],
        events=program.events - sum(cut.times * cut.stretch.period.recorded for cut in cuts),
        stretches=(),
    )


def numbered(kinds: Ints) -> tuple[Bools, Bools]:
    """Rows whose argument is an event's, and a transfer's number."""
    return np.isin(kinds, (Row.RECORD, Row.WAIT, Row.SYNC)), np.isin(kinds, (Row.SEND, Row.RECEIVE))
