"""The steady state of a schedule: a rank does the same again and again, each time with later micro-batches.

A rank's steps without the repetitions can be recorded in a fraction of the time; `runtime.unfold` puts them back in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.runtime.schedules.actions import Kind
from sim.runtime.schedules.transfers import Step

WORTH = 0.8
"""Fold where this part of the steps is left at most."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A rank's steps with `times` periods left out behind step `end`; what follows is renumbered, `shift` micro-batches
    less per period. Steps before .. begin and begin .. end are two whole periods.

    oldest: what was begun before this step has ended before step `before`, or stays until the steady state is over.
    """

    steps: tuple[Step, ...]
    oldest: int
    before: int
    begin: int
    end: int
    times: int
    shift: int


def fold(steps: Sequence[Step]) -> Fold | None:
    """The folded steps, or None where too little repeats."""
    found = _periodic(steps)
    if found is None:
        return None
    first, last, length, shift = found
    whole = (last - first) // length
    oldest = _oldest_in_flight(steps)
    new = max(steps.index(next(s for s in steps if _kind(s) == kind)) for kind in set(map(_kind, steps[first:last])))
    for kept in range(2, whole - 1):  # the last is left as it is: gradients may be reduced there
        begin = first + (kept - 1) * length
        since = min(oldest[begin - length], begin - 2 * length)
        if since > new:  # what is made once and for all is there
            times = whole - 1 - kept
            rest = [_earlier(step, times * shift) for step in steps[begin + length * (times + 1) :]]
            folded = (*steps[: begin + length], *rest)
            if len(folded) > WORTH * len(steps):
                return None
            return Fold(folded, since, begin - length, begin, begin + length, times, shift)
    return None


def _periodic(steps: Sequence[Step]) -> tuple[int, int, int, int] | None:
    """The longest stretch first .. last in which every step comes again `length` steps later with `shift` added to its
    micro-batch."""
    kinds: dict[object, int] = {}
    kind = np.array([kinds.setdefault(_kind(step), len(kinds)) for step in steps])
    batch = np.array([step.action.micro_batch for step in steps])
    if not len(steps):
        return None
    middle = len(steps) // 2
    again = np.flatnonzero(kind[middle + 1 :] == kind[middle]) + 1
    best: tuple[int, int, int, int, int] | None = None
    for length in again[: 4 * len(kinds) + 64].tolist():
        shift = int(batch[middle + length] - batch[middle])
        alike = (kind[length:] == kind[:-length]) & (batch[length:] - batch[:-length] == shift)
        breaks = np.flatnonzero(~alike)
        at = int(np.searchsorted(breaks, middle))
        first = int(breaks[at - 1]) + 1 if at else 0
        last = (int(breaks[at]) if at < len(breaks) else len(alike)) + length
        if shift > 0 and alike[middle] and (best is None or (last - first, -length) > best[:2]):
            best = (last - first, -length, first, length, shift)
    if best is None:
        return None
    extent, _, first, length, shift = best
    return first, first + extent, length, shift


def _kind(step: Step) -> tuple[object, ...]:
    return step.action.stage, step.action.kind, step.receives, step.sends


def _oldest_in_flight(steps: Sequence[Step]) -> list[int]:
    """Before every step: the first one that has to do with a micro-batch of a stage which is not through by then."""
    begun: dict[tuple[int, int], int] = {}  # in the order in which they began
    oldest = []
    for at, step in enumerate(steps):
        oldest.append(next(iter(begun.values()), at))
        action = step.action
        if action.kind is Kind.FORWARD and step.sends is None:
            stage = action.stage + (step.receives is not None)
            begun.setdefault((stage, action.micro_batch), at)
        elif step.computes and action.kind is not Kind.INPUT_GRADIENT:
            begun.pop((action.stage, action.micro_batch), None)
    return oldest


def _earlier(step: Step, micro_batches: int) -> Step:
    action = step.action._replace(micro_batch=step.action.micro_batch - micro_batches)
    return Step(action, step.receives, step.sends)
