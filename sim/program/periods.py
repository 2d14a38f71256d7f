"""What a program issues again and again: the steady state of a pipeline's schedule, micro-batches whose gradients add up.

    rows   ... before | 0 | 1 | 2 | ... | times - 1 | after ...        a stretch of equal periods

A period issues what the one before did, with later numbers for what is its own. So a program can be recorded, and
played, without most of them (`runtime.unfold`, `engine.folded`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Position(NamedTuple):
    """A point in issue order: rows, memory events, allocations and recorded events before it."""

    rows: int
    events: int
    handles: int
    recorded: int

    def __add__(self, other: tuple[int, ...]) -> Position:  # type: ignore[override]
        return Position(*(a + b for a, b in zip(self, other)))

    def __sub__(self, other: Position) -> Position:
        return Position(*(a - b for a, b in zip(self, other)))

    def __mul__(self, times: int) -> Position:  # type: ignore[override]
        return Position(*(a * times for a in self))


@dataclass(frozen=True, slots=True)
class Stretch:
    """`times` periods of equal length `period`, the first from `begin` on; each is for micro-batches `shift` later than
    the one before. Numbers from `oldest` on are the periods' own and grow with them; earlier ones stay as they are."""

    oldest: Position
    begin: Position
    period: Position
    times: int
    shift: int
    earlier: int = 0
    """So many periods before the first one issue the same rows, but other memory events."""

    def moved(self, by: Position) -> Stretch:
        """The same, issued so much later."""
        return replace(self, oldest=self.oldest + by, begin=self.begin + by)

    @property
    def end_row(self) -> int:
        return self.begin.rows + self.times * self.period.rows
