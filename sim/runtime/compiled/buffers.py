"""Launches of a compiled region and the lives of their buffers, as Inductor's generated wrapper allocates and frees them.

A buffer dies after its last use. One of equal dtype and size takes a dead one's place, be it much later, unless that
would raise the region's peak (torch/_inductor/codegen/wrapper.py, EfficientPeakEstimate).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sim.runtime.compiled.graph import Kind, Value

Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class Step:
    """One launch: an extern, or a generated kernel that writes `members` (those that nobody else reads stay inside).

    `taken`: whose bytes a written value takes over; `dead`: what is freed afterwards.
    """

    members: list[Value]
    sources: dict[Value, set[Value]] = field(default_factory=dict)
    """What each member reads in memory."""
    reads: set[Value] = field(default_factory=set)
    written: list[Value] = field(default_factory=list)
    taken: dict[Value, Value] = field(default_factory=dict)
    dead: list[Value] = field(default_factory=list)
    moved_bytes: int = 0

    @property
    def extern(self) -> Value | None:
        first = self.members[0]
        return first if first.kind is Kind.EXTERN else None

    @property
    def column(self) -> bool:
        return any(value.column for value in self.members)

    @property
    def forward(self) -> bool:
        """Does it compute forward values only?"""
        return all(value.forward for value in self.members)


class _Dead(NamedTuple):
    """A buffer that nobody needs since a step."""

    value: Value
    position: int


def place_buffers(steps: list[Step], given: set[Value], kept: set[Value], lent: set[Value]) -> None:
    """Fills in `taken` and `dead` of each step. `kept` outlive the region; `lent` are not taken over."""
    last: dict[Value, int] = {}
    for position, step in enumerate(steps):
        for value in (*step.reads, *step.written):
            last[value] = position
    peaks = _Peaks(steps, last, given, kept)
    waiting: dict[Key, list[_Dead]] = {}
    died: dict[Value, int] = {}
    for position, step in enumerate(steps):
        dying = [v for v in sorted(step.reads, key=lambda v: v.number) if last[v] == position and v not in kept]
        planned = step.extern is None or (step.extern.extern is not None and step.extern.extern.planned)
        for value in step.written if planned else []:
            old = _overwritten(value, step, [v for v in dying if v not in lent])
            old = old or _waiting(value, position, waiting, peaks)
            if old is not None:
                step.taken[value] = old
                died.pop(old, None)
        dying += [v for v in step.written if last[v] == position and v not in kept]
        for value in dying:
            if value not in step.taken.values():
                died[value] = position
                if value not in lent:
                    waiting.setdefault(_key(value), []).append(_Dead(value, position))
    for value, position in died.items():
        steps[position].dead.append(value)


def _key(value: Value) -> Key:
    return value.dtype, value.elements


def _overwritten(value: Value, step: Step, dying: list[Value]) -> Value | None:
    """A kernel may write over what it reads last, if no other of its members reads that."""
    for old in dying if step.extern is None else []:
        readers = [member for member, sources in step.sources.items() if old in sources]
        if readers == [value] and _key(old) == _key(value) and old not in step.taken.values():
            return old
    return None


def _waiting(value: Value, position: int, waiting: dict[Key, list[_Dead]], peaks: _Peaks) -> Value | None:
    """The buffer of equal size that died last, unless keeping it until now makes a new peak."""
    dead = waiting.get(_key(value))
    if not dead or not peaks.allow(dead[-1].position, position, value.bytes):
        return None
    return dead.pop().value


class _Peaks:
    """Bytes alive during each step if nothing takes a dead buffer's place; the region's own inputs do not count."""

    def __init__(self, steps: list[Step], last: dict[Value, int], given: set[Value], kept: set[Value]) -> None:
        alive = sum(
            value.bytes for value in given if value in last and not (value.kind is Kind.INPUT and value.forward)
        )
        self._during: list[int] = []
        for position, step in enumerate(steps):
            alive += sum(value.bytes for value in step.written)
            self._during.append(alive)
            dying = [v for v in {*step.reads, *step.written} if last[v] == position and v not in kept]
            alive -= sum(v.bytes for v in dying if not (v.kind is Kind.INPUT and v.forward))
        self._highest = max(self._during, default=0)

    def allow(self, died: int, taken: int, size_bytes: int) -> bool:
        between = range(died + 1, taken)
        if between and size_bytes + max(self._during[i] for i in between) > self._highest:
            return False
        for i in between:
            self._during[i] += size_bytes
        return True
