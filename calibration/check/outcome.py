"""What the loop found: a line per strategy and batch, and whether the targets are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SLOWDOWN_TARGET, TIME_TARGET = 0.04, 0.10
"""Largest error of a strategy's slowdown; of the absolute time, the median over the strategies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One strategy. Times in ns; `spread`: half the distance of the rounds' quartiles over their median; slowdowns are
    relative to plain of the same network and batch. Of the control nothing is predicted but what plain is."""

    network: str
    batch: int
    strategy: str
    predicted_ns: float
    measured_ns: float
    spread: float
    predicted_slowdown: float
    measured_slowdown: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_reserved_bytes: int = 0
    measured_reserved_bytes: int = 0
    """Of a caching allocator, where there is one."""
    control: bool = False

    @property
    def error(self) -> float:
        return self.predicted_ns / self.measured_ns - 1

    @property
    def slowdown_error(self) -> float:
        return self.predicted_slowdown / self.measured_slowdown - 1

    @property
    def bytes_equal(self) -> bool:
        return self.predicted_peak_bytes == self.measured_peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`rounds`: the fewest of any line. `host`: the framework's costs in us that were learnt."""

    machine: dict[str, Any]
    rounds: int
    lines: Sequence[Line]
    host: dict[str, float]
    finished: bool = True

    @property
    def checked(self) -> list[Line]:
        return [line for line in self.lines if not line.control]

    @property
    def bytes_equal(self) -> bool:
        return all(line.bytes_equal for line in self.checked)

    @property
    def worst_slowdown_error(self) -> float:
        return max((abs(line.slowdown_error) for line in self.checked), default=0.0)

    @property
    def median_error(self) -> float:
        return float(np.median([abs(line.error) for line in self.checked])) if self.checked else 0.0

    @property
    def control_error(self) -> float:
        """The largest difference between two measurements of plain."""
        return max((abs(line.measured_slowdown - 1) for line in self.lines if line.control), default=0.0)

    @property
    def times_met(self) -> bool:
        return self.worst_slowdown_error <= SLOWDOWN_TARGET and self.median_error <= TIME_TARGET

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "rounds": self.rounds,
            "finished": self.finished,
            "host_us": self.host,
            "lines": [
                asdict(line)
                | {
                    "error": line.error,
                    "slowdown_error": line.slowdown_error,
                    "bytes_equal": line.bytes_equal,
                }
                for line in self.lines
            ],
            "worst_slowdown_error": self.worst_slowdown_error,
            "median_error": self.median_error,
            "control_error": self.control_error,
            "bytes_equal": self.bytes_equal,
            "times_met": self.times_met,
        }
