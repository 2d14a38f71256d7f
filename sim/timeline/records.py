"""What the engine leaves behind: when each row ran, and in how many pieces each burst.

Times are float64 nanoseconds from the start of the run. They are whole as long as nothing but whole durations decided
them; a flow or a contention change leaves fractions.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from sim.program.passage import Floats, Span

RateChange = tuple[float, int, float]
"""(time_ns, meeting, bytes_per_ns): from this time on the flow of a meeting moves at this rate; 0 when it has ended."""


class Piece(NamedTuple):
    """A burst, or the rest of it, as it was planned at `start_ns`; a later piece of the same row replaces its rest.

    `fraction` of kernel `kernel` has been done before. `starts_ns` holds the starts of the kernels from `kernel` on
    where the host was still issuing them; else they follow each other.
    """

    row: int
    base_ns: float  # the host's clock before the first launch
    start_ns: float
    level: int
    kernel: int
    fraction: float
    starts_ns: Floats | None


class Part(NamedTuple):
    """A passage, or the rest of it, as it was planned at one level: entries at `spans`, from entry `follows` on the
    level's timeline, shifted; a later part of the same row replaces its rest. `begun`: the first span is the rest of an
    entry that keeps its start.
    """

    row: int
    base_ns: float  # the host's clock before the first entry
    level: int
    follows: int
    shift_ns: float
    spans: list[Span]
    begun: bool


@dataclass(frozen=True, slots=True)
class RankPlayed:
    """One rank: times of its rows, pieces of its bursts, parts of its passages, when its host and its last stream were
    through."""

    rows: array[float]
    """Four numbers for each row that is no burst or passage: row, issue_ns, start_ns, end_ns. A row of the host alone is
    issued when it starts."""
    pieces: list[Piece]
    parts: list[Part]
    host_end_ns: float
    device_end_ns: float


@dataclass(frozen=True, slots=True)
class Played:
    """A world after its run. `fired_ns` by event, `met_ns` (last arrival) and `parted_ns` by meeting; NaN if never.

    `rates` is empty unless it was asked for.
    """

    ranks: list[RankPlayed]
    fired_ns: list[float]
    met_ns: list[float]
    parted_ns: list[float]
    rates: list[RateChange]

    @property
    def end_ns(self) -> float:
        """When the last host and the last stream were through."""
        return max((max(rank.host_end_ns, rank.device_end_ns) for rank in self.ranks), default=0.0)
