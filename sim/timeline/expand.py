"""From the pieces of bursts to one entry per kernel. Made on demand: step time and memory need no kernel rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sim.program.passage import Floats, Passage
from sim.program.program import Ints
from sim.program.world import BURST, PASSAGE, Burst, RankProgram, World
from sim.timeline.records import Part, Piece, Played

BESIDE = -2


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Columns with one entry per issued instruction of a rank, in host order; `kernel` is 0 in rows other than bursts.

    `stream` is -1 for rows of the host alone, BESIDE for a passage's entries beside its main stream. Times are float64
    nanoseconds.
    """

    row: Ints
    kernel: Ints
    stream: Ints
    issue_ns: Floats
    start_ns: Floats
    end_ns: Floats


def expand(world: World, played: Played, rank: int) -> KernelTimes:
    """When every kernel and every other row of a rank was issued, started and ended."""
    program, run = world.ranks[rank], played.ranks[rank]
    size = np.ones(len(program.kind), np.int64)
    is_burst = program.kind == BURST
    size[is_burst] = np.array([burst.size for burst in world.bursts], np.int64)[program.argument[is_burst]]
    is_passage = program.kind == PASSAGE
    size[is_passage] = np.array([passage.size for passage in world.passages], np.int64)[program.argument[is_passage]]
    first = np.cumsum(size) - size  # entry of the first kernel of each row
    row = np.repeat(np.arange(len(size)), size)
    issue_ns, start_ns, end_ns = np.full((3, len(row)), np.nan)
    times = KernelTimes(row, np.arange(len(row)) - first[row], program.stream[row], issue_ns, start_ns, end_ns)

    if run.rows:
        rows, issues, starts, ends = np.frombuffer(run.rows).reshape(-1, 4).T
        at = first[rows.astype(np.int64)]
        issue_ns[at], start_ns[at], end_ns[at] = issues, starts, ends
    cut = _fill_whole(times, first, world, program, run.pieces)
    for piece in cut:
        burst = world.bursts[program.argument[piece.row]]
        _fill_cut(times, int(first[piece.row]), burst, program.scale[piece.row], piece)
    for number in np.unique(program.argument[is_passage]).tolist():
        at = first[is_passage & (program.argument == number)]
        times.stream[at[:, None] + np.flatnonzero(world.passages[number].beside)] = BESIDE
    for part in _fill_passages(times, first, world, program, run.parts):
        _fill_part(times, int(first[part.row]), world.passages[program.argument[part.row]], part)
    return times


def _fill_whole(
    times: KernelTimes, first: Ints, world: World, program: RankProgram, pieces: Iterable[Piece]
) -> list[Piece]:
    """One broadcast for all stamps of a template at one level and scale; returns the pieces that need care singly.

    A piece is whole if it was planned from its first kernel on, with nothing to wait for: prefix sums say all then.
    """
    alike: dict[tuple[int, int, float], list[tuple[int, float, float]]] = {}
    cut: list[Piece] = []
    template, scales = program.argument.tolist(), program.scale.tolist()
    for piece in pieces:
        row, base_ns, start_ns, level, kernel, fraction, starved_ns = piece
        if kernel or fraction or starved_ns is not None:
            cut.append(piece)
        else:
            alike.setdefault((template[row], level, scales[row]), []).append((row, base_ns, start_ns))
    for (number, level, scale), stamps in alike.items():
        burst, (rows, bases, starts) = world.bursts[number], np.array(stamps).T
        at = first[rows.astype(np.int64)][:, None] + np.arange(burst.size)
        times.issue_ns[at] = bases[:, None] + burst.issue_ns[1:]
        times.start_ns[at] = starts[:, None] + burst.work_ns[level, :-1] * scale
        times.end_ns[at] = starts[:, None] + burst.work_ns[level, 1:] * scale
    return cut


def _fill_cut(times: KernelTimes, first: int, burst: Burst, scale: float, piece: Piece) -> None:
    """The rest of a burst from `piece.kernel` on, over what earlier pieces foresaw; a begun kernel keeps its start."""
    kernel, fraction = piece.kernel, piece.fraction
    duration_ns = burst.duration_ns[piece.level, kernel:] * scale
    duration_ns[0] *= 1.0 - fraction
    starts_ns = piece.starts_ns
    if starts_ns is None:
        starts_ns = piece.start_ns + np.cumsum(duration_ns) - duration_ns
    begun = fraction > 0.0
    rest = slice(first + kernel, first + burst.size)
    times.issue_ns[first : first + burst.size] = piece.base_ns + burst.issue_ns[1:]
    times.start_ns[rest.start + begun : rest.stop] = starts_ns[begun:]
    times.end_ns[rest] = starts_ns + duration_ns


def _fill_passages(
    times: KernelTimes, first: Ints, world: World, program: RankProgram, parts: Iterable[Part]
) -> list[Part]:
    """One broadcast for all stamps of a passage that began on one timeline; returns the parts that need care singly."""
    alike: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
    cut: list[Part] = []
    numbers = program.argument.tolist()
    for part in parts:
        if part.follows or part.begun:
            cut.append(part)
        else:
            alike.setdefault((numbers[part.row], part.level), []).append((part.row, part.base_ns, part.shift_ns))
    for (number, level), stamps in alike.items():
        passage, (rows, bases, shifts) = world.passages[number], np.array(stamps).T
        timeline = passage.timelines[level]
        at = first[rows.astype(np.int64)][:, None] + np.arange(passage.size)
        times.issue_ns[at] = bases[:, None] + passage.issues[1:]
        times.start_ns[at] = shifts[:, None] + timeline.starts
        times.end_ns[at] = shifts[:, None] + timeline.ends
    return cut


def _fill_part(times: KernelTimes, first: int, passage: Passage, part: Part) -> None:
    """The rest of a passage over what earlier parts foresaw."""
    times.issue_ns[first : first + passage.size] = part.base_ns + passage.issues[1:]
    timeline = passage.timelines[part.level]
    rest = slice(first + part.follows, first + passage.size)
    times.start_ns[rest] = timeline.starts[part.follows :] + part.shift_ns
    times.end_ns[rest] = timeline.ends[part.follows :] + part.shift_ns
    for number, (entry, start_ns, end_ns) in enumerate(part.spans):
        if number or not part.begun:
            times.start_ns[first + entry] = start_ns
        times.end_ns[first + entry] = end_ns
