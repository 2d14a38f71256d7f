"""The times of programs of which most equal periods are not played.

    played   ... 0 1 2 3 4 5 6 ...            all ranks without the same number of micro-batches
    whole    ... 0 1 2 3 4 4'4'4'4' 5 6 ...   4' is 4 shifted by 1, 2, 3, 4 periods of time; what follows by 4

A world is deterministic, and a shift in time changes nothing. So if at one moment it stands as it stood a period before,
and every host has more periods to issue, it goes on as it went, as often as there are periods. It stands as before if
all that was under way then, and all that went on beside it since that began, happened one period of time after its
counterpart; hosts with their lead included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from sim.program.periods import Stretch
from sim.program.program import Program, Row
from sim.program.shorter import Cut, shorter
from sim.program.world import LAUNCH_QUEUE_ROWS, Floats
from sim.runtime.driver_calls import HostCall
from sim.timeline.lanes import Lanes

TOLERANCE_NS = 1e-3
LOOKED_AT = 4
"""So many periods before that moment everything must repeat. What runs then began in the last one (a stream does all of a
period in one), and what ran beside it in the one before."""
WORTH = 0.8
"""Leave periods out where this part of the rows is left at most."""

MORE = 3
"""Where a world does not repeat itself yet, so many times the periods are played."""

Play = Callable[[Sequence[Program], Sequence[Sequence[HostCall]]], list[Lanes]]


@dataclass(frozen=True, slots=True)
class _Zone:
    """`times` joint periods of a rank up to its period `end`, in which its allocator calls no driver. A joint period is
    `joint` of the rank's own: so many that all ranks have gone through the same number of micro-batches."""

    stretch: Stretch
    end: int
    times: int
    joint: int

    def cut(self, times: int) -> Cut:
        """The last `times` joint periods."""
        return Cut(self.stretch, self.end - times * self.joint, times * self.joint)


@dataclass(frozen=True, slots=True)
class _Span:
    """A zone as it was played: rows begin .. end, joint periods of `length` rows."""

    begin: int
    end: int
    length: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A joint period lasts `period_ns`; per rank, the row before which more of them can be put in."""

    period_ns: float
    rows: list[int]


@dataclass(frozen=True, slots=True)
class _Insertion:
    """`times` copies of the `length` rows before `row`, each `period_ns` after the one before."""

    row: int
    length: int
    times: int
    period_ns: float


def play_folded(programs: Sequence[Program], calls: Sequence[Sequence[HostCall]], play: Play) -> list[Lanes]:
    """Lanes of every rank, as `play` gives them for the whole programs, but for rounding."""
    steps = _zones(programs, calls)
    kept = [max(map(_first_try, programs, zones)) for zones in steps]
    rows = sum(len(program.row_kind) for program in programs)
    while True:
        times = [_left_out(zones, keep) for zones, keep in zip(steps, kept)]
        cuts = [[zone.cut(n) for zone, n in zip(own, times)] for own in zip(*steps)]
        if sum(cut.length for own in cuts for cut in own) < (1 - WORTH) * rows:
            return play(programs, calls)
        lanes = play(
            list(map(shorter, programs, cuts)),
            [[_earlier(call, own) for call in made] for made, own in zip(calls, cuts)],
        )
        spans = [[_span(zone, own) for zone, own in zip(zones, cuts)] for zones in steps]
        repeats = [_repeat(lanes, own) if n else None for own, n in zip(spans, times)]
        failed = [n > 0 and repeat is None for n, repeat in zip(times, repeats)]
        if not any(failed):
            insertions = [
                [
                    _Insertion(repeat.rows[rank], own[rank].length, n, repeat.period_ns)
                    for own, n, repeat in zip(spans, times, repeats)
                    if repeat is not None
                ]
                for rank in range(len(programs))
            ]
            return list(map(_unfolded, programs, lanes, insertions))
        kept = [keep * MORE if wrong else keep for keep, wrong in zip(kept, failed)]


def _left_out(zones: Sequence[_Zone], kept: int) -> int:
    """So many joint periods of a step, if at least half of them."""
    times = min(zone.times for zone in zones)
    return times - kept if 2 * kept <= times else 0


def _zones(programs: Sequence[Program], calls: Sequence[Sequence[HostCall]]) -> list[list[_Zone]]:
    """The zone of every rank, per step; nothing where not all ranks know their periods."""
    if len({len(program.stretches) for program in programs}) > 1:
        return []
    steps = []
    for stretches in zip(*(program.stretches for program in programs)):
        micro_batches = lcm(*(stretch.shift for stretch in stretches))
        joint = [micro_batches // stretch.shift for stretch in stretches]
        runs = [_longest_run(stretch, made) for stretch, made in zip(stretches, calls)]
        steps.append([_Zone(s, end, (end - first) // n, n) for s, (first, end), n in zip(stretches, runs, joint)])
    return steps


def _longest_run(stretch: Stretch, calls: Sequence[HostCall]) -> tuple[int, int]:
    """Periods first .. end - 1, counted from the stretch's first: most without a driver call."""
    places = {(call.row - stretch.begin.rows) // stretch.period.rows for call in calls}
    before = -stretch.earlier - 1
    borders = [before, *sorted(place for place in places if before < place < stretch.times), stretch.times]
    return max(((a + 1, b) for a, b in pairwise(borders)), key=lambda run: run[1] - run[0])


def _first_try(program: Program, zone: _Zone) -> int:
    """So many joint periods to play: those that are looked at, and for the host to get as far ahead as it can, twice."""
    begin, length = zone.stretch.begin.rows, zone.joint * zone.stretch.period.rows
    launches = int((program.row_kind[begin : begin + length] == Row.LAUNCH).sum())
    return LOOKED_AT + 2 + 2 * -(-LAUNCH_QUEUE_ROWS // max(1, launches))


def _earlier(call: HostCall, cuts: Sequence[Cut]) -> HostCall:
    return HostCall(_played_row(call.row, cuts), call.host_ns, call.waits)


def _played_row(row: int, cuts: Sequence[Cut]) -> int:
    """Where a row that is not left out stands in what is played."""
    return row - sum(cut.length for cut in cuts if cut.rows.stop <= row)


def _span(zone: _Zone, cuts: Sequence[Cut]) -> _Span:
    stretch = zone.stretch
    length = zone.joint * stretch.period.rows
    end = _played_row(stretch.begin.rows + zone.end * stretch.period.rows, cuts)
    n = next(cut.times for cut in cuts if cut.stretch is stretch) // zone.joint
    return _Span(end - (zone.times - n) * length, end, length)


def _repeat(lanes: Sequence[Lanes], spans: Sequence[_Span]) -> _Repeat | None:
    """How the world repeats itself at the moment when the first host is about to issue its last joint period; None where it
    does not."""
    moment, period_ns = min(
        (float(own.issue_ns[at]), float(own.issue_ns[at] - own.issue_ns[at - span.length]))
        for own, span in zip(lanes, spans)
        for at in (span.end - span.length,)
    )
    since = moment - LOOKED_AT * period_ns
    rows = []
    for own, span in zip(lanes, spans):
        begin, end, length = span.begin + span.length, span.end, span.length
        late = np.flatnonzero(own.end_ns[:end] > since)
        first = int(late[0]) if len(late) else 0
        if first < begin:
            return None
        first -= (first - begin) % length
        for column in (own.issue_ns, own.start_ns, own.end_ns):
            now, before = column[first:end], column[first - length : end - length]
            known = now <= moment + TOLERANCE_NS
            if (np.abs(now - before - period_ns) > TOLERANCE_NS)[known].any():
                return None
            again = before <= moment - period_ns + TOLERANCE_NS
            if np.count_nonzero(again) != np.count_nonzero(known):
                return None
        over = first + int(np.argmax(own.end_ns[first:end] > moment))
        rows.append(over - (over - begin) % length)
    return _Repeat(period_ns, rows)


def _unfolded(program: Program, played: Lanes, insertions: Sequence[_Insertion]) -> Lanes:
    late_ns = sum(i.times * i.period_ns for i in insertions)
    return Lanes(
        program=program,
        issue_ns=_inserted(played.issue_ns, insertions),
        start_ns=_inserted(played.start_ns, insertions),
        end_ns=_inserted(played.end_ns, insertions),
        host_end_ns=played.host_end_ns + late_ns,
        device_end_ns=played.device_end_ns + late_ns,
    )


def _inserted(column: Floats, insertions: Sequence[_Insertion]) -> Floats:
    made = np.empty(len(column) + sum(i.times * i.length for i in insertions))
    done = at = 0
    late_ns = 0.0
    for i in insertions:
        copies = i.times * i.length
        made[at : at + i.row - done] = column[done : i.row] + late_ns
        at += i.row - done
        after_ns = late_ns + i.period_ns * np.arange(1, i.times + 1)
        np.add(column[i.row - i.length : i.row], after_ns[:, None], out=made[at : at + copies].reshape(i.times, -1))
        at += copies
        late_ns += i.times * i.period_ns
        done = i.row
    made[at:] = column[done:] + late_ns
    return made
