"""When every row of a program ran: the stream lanes of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sim.program.program import COMPUTE, PHASE_SHIFT, Ints, Phase, Program, Row
from sim.program.world import Floats, World
from sim.timeline.expand import expand
from sim.timeline.records import Played

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Lanes:
    """Times of one rank in float64 nanoseconds; arrays have one entry per row of the program, in issue order."""

    program: Program
    issue_ns: Floats
    start_ns: Floats
    end_ns: Floats
    host_end_ns: float
    device_end_ns: float

    @cached_property
    def is_kernel(self) -> Bools:
        return np.equal(self.program.row_kind, Row.LAUNCH)

    @cached_property
    def is_collective(self) -> Bools:
        return np.equal(self.program.row_kind, Row.COLLECTIVE)

    @cached_property
    def is_copy(self) -> Bools:
        return np.equal(self.program.row_kind, Row.COPY)

    @cached_property
    def runs(self) -> Bools:
        """Rows that take time on a stream: kernels, collectives and copies."""
        return self.is_kernel | self.is_collective | self.is_copy

    @cached_property
    def is_transfer(self) -> Bools:
        """Collectives, and kernels on streams that only communicate (the chain's communication)."""
        return self.is_collective | (self.is_kernel & (self.program.row_stream > COMPUTE) & self._communicates)

    @cached_property
    def is_receive(self) -> Bools:
        """Receives of a pipeline: a row lasts from when it could begin until all has come, most of it waiting."""
        return np.equal(self.program.row_kind, Row.RECEIVE)

    @cached_property
    def _communicates(self) -> Bools:
        named = np.array([k.name.endswith("communication") for k in self.program.kernels], bool)
        result = np.zeros(len(self.program.row_kind), bool)
        result[self.is_kernel] = named[self.program.row_argument[self.is_kernel]] if len(named) else False
        return result

    @cached_property
    def phase(self) -> Ints:
        """Phase of every row."""
        return self.program.row_where >> PHASE_SHIFT

    @cached_property
    def computes(self) -> Bools:
        """Kernels on the compute stream."""
        return self.is_kernel & np.equal(self.program.row_stream, COMPUTE)

    def in_step(self, first_row: int, last_row: int) -> Bools:
        """Rows first_row..last_row-1 as a mask."""
        mask = np.zeros(len(self.start_ns), bool)
        mask[first_row:last_row] = True
        return mask

    def busy_ns(self, rows: Bools) -> float:
        """Time in which at least one of `rows` runs."""
        return total(merged(self.start_ns[rows], self.end_ns[rows]))

    def exposed_ns(self, rows: Bools) -> float:
        """Time in which any of `rows` that is no compute kernel runs, and no compute kernel among them does."""
        kernels = rows & self.computes
        moving = merged(self.start_ns[rows & ~kernels], self.end_ns[rows & ~kernels])
        working = merged(self.start_ns[kernels], self.end_ns[kernels])
        return total(moving) - overlap(moving, working)

    def waits_for_stages_ns(self, rows: Bools) -> float:
        """Time in which a receive among `rows` is pending, and neither compute nor a transfer runs."""
        receives, busy = rows & self.is_receive, rows & (self.computes | self.is_transfer)
        pending = merged(self.start_ns[receives], self.end_ns[receives])
        return total(pending) - overlap(pending, merged(self.start_ns[busy], self.end_ns[busy]))

    def kernel_ns(self, rows: Bools, phase: Phase) -> float:
        """Summed duration of compute-stream kernels of a phase among `rows`."""
        chosen = rows & self.computes & (self.phase == phase)
        return float((self.end_ns[chosen] - self.start_ns[chosen]).sum())


def make_lanes(program: Program, world: World, played: Played, entry_of_row: Ints, rank: int = 0) -> Lanes:
    """Lanes of a rank, without the rows that lowering inserted (driver calls)."""
    times = expand(world, played, rank)
    run = played.ranks[rank]
    return Lanes(
        program=program,
        issue_ns=times.issue_ns[entry_of_row],
        start_ns=times.start_ns[entry_of_row],
        end_ns=times.end_ns[entry_of_row],
        host_end_ns=run.host_end_ns,
        device_end_ns=run.device_end_ns,
    )


def merged(start: Floats, end: Floats) -> Floats:
    """Disjoint, sorted intervals [n, 2] that cover the same time; empty ones are dropped."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return np.zeros((0, 2))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.ones(len(start), bool)
    first[1:] = start[1:] > end[:-1]
    starts = start[first]
    ends = np.append(end[np.flatnonzero(first)[1:] - 1], end[-1])
    return np.stack([starts, ends], axis=1)


def total(intervals: Floats) -> float:
    """Length of disjoint intervals."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def without(a: Floats, b: Floats) -> Floats:
    """The part of disjoint, sorted intervals `a` that `b`, as such, does not cover."""
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    middle = (edges[1:] + edges[:-1]) / 2

    def inside(intervals: Floats) -> Bools:
        if not len(intervals):
            return np.zeros(len(middle), bool)
        i = np.searchsorted(intervals[:, 0], middle, "right") - 1
        covered: Bools = (i >= 0) & (middle < intervals[np.maximum(i, 0), 1])
        return covered

    keep = inside(a) & ~inside(b)
    return merged(edges[:-1][keep], edges[1:][keep])


def overlap(a: Floats, b: Floats) -> float:
    """Length of the time that two sets of disjoint, sorted intervals share."""
    if not len(a) or not len(b):
        return 0.0
    lengths = np.cumsum(b[:, 1] - b[:, 0])

    def covered(t: Floats) -> Floats:
        """Time that b covers before t."""
        i = np.searchsorted(b[:, 0], t, "right") - 1
        before = np.where(i > 0, lengths[np.maximum(i - 1, 0)], 0.0)
        inside = np.where(i >= 0, np.minimum(t, b[np.maximum(i, 0), 1]) - b[np.maximum(i, 0), 0], 0.0)
        return before + inside

    return float((covered(a[:, 1]) - covered(a[:, 0])).sum())
