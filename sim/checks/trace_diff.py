"""A simulated trace beside another, mostly a real one: step, compute, exposed communication, idle, families of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from sim.checks.kineto import RankTrace, Step

PARTS: tuple[tuple[str, Callable[[Step], float]], ...] = (
    ("step", lambda step: step.length),
    ("compute", lambda step: step.compute),
    ("exposed communication", lambda step: step.exposed_communication),
    ("exposed copies", lambda step: step.exposed_copies),
    ("idle", lambda step: step.idle),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of both: microseconds of a step, and how many kernels make it up (0 for parts of a step)."""

    name: str
    simulated_us: float
    other_us: float
    simulated_count: int = 0
    other_count: int = 0

    @property
    def difference(self) -> float | None:
        """Simulated over the other less one; None where the other has none."""
        return self.simulated_us / self.other_us - 1 if self.other_us else None


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """Medians over the steps that count (`steady`) of both traces' slowest ranks.

    other: is the second trace a real one or simulated, too?
    unnamed: what no family knows in the other trace, microseconds in a step, the largest first.
    """

    other: Literal["real", "simulated"]

    parts: tuple[Line, ...]
    families: tuple[Line, ...]
    unnamed: tuple[tuple[str, float], ...]
    steps: tuple[int, int]
    ranks: tuple[int, int]


def steady(trace: RankTrace) -> Sequence[Step]:
    """The steps that count: the first one creates states, warms caches; a simulated run ends with the steady one."""
    if trace.simulated:
        return trace.steps[-1:]
    return trace.steps[1:] if len(trace.steps) > 1 else trace.steps


def slowest(traces: Sequence[RankTrace]) -> RankTrace:
    """The rank with the longest median step."""
    return max(traces, key=lambda trace: median(step.length for step in steady(trace)))


def trace_diff(simulated: Sequence[RankTrace], other: Sequence[RankTrace]) -> TraceDiff:
    """Both runs' slowest ranks beside each other."""
    ours, theirs = steady(slowest(simulated)), steady(slowest(other))
    parts = tuple(Line(name, median(map(of, ours)), median(map(of, theirs))) for name, of in PARTS)
    names = dict.fromkeys(name for step in (*ours, *theirs) for name in step.families)
    families = [
        Line(name, _time(ours, name), _time(theirs, name), _count(ours, name), _count(theirs, name)) for name in names
    ]
    unnamed: Counter[str] = Counter()
    for step in theirs:
        unnamed.update({name: time / len(theirs) for name, time in step.unnamed.items()})
    return TraceDiff(
        other="simulated" if other[0].simulated else "real",
        parts=parts,
        families=tuple(sorted(families, key=lambda line: -max(line.simulated_us, line.other_us))),
        unnamed=tuple(unnamed.most_common(5)),
        steps=(len(ours), len(theirs)),
        ranks=(len(simulated), len(other)),
    )


def _time(steps: Sequence[Step], family: str) -> float:
    return median(step.families.get(family, (0, 0.0))[1] for step in steps)


def _count(steps: Sequence[Step], family: str) -> int:
    return round(median(step.families.get(family, (0, 0.0))[0] for step in steps))
