"""How a call is timed: warm-up, as many rounds as its time allows, median and percentiles.

On a CPU a call is timed twice where caches decide: hot (the same operands in every round) and cold (operands rotated
through more memory than the last cache holds). On CUDA operands always rotate through more than the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Call = Callable[[], object]


class Clock(Protocol):
    """What a device must do to time a call."""

    def time_ns(self, call: Call, rounds: int) -> list[float]:
        """Time of one call in each of so many rounds, in ns."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one call in ns over `rounds`."""

    median_ns: float
    p10_ns: float
    p90_ns: float
    rounds: int

    @classmethod
    def of(cls, times_ns: Sequence[float]) -> Measured:
        p10, median, p90 = np.quantile(np.asarray(times_ns, float), (0.1, 0.5, 0.9)).tolist()
        return cls(median, p10, p90, len(times_ns))

    @property
    def relative_spread(self) -> float:
        """Half the distance between the percentiles over the median."""
        return (self.p90_ns - self.p10_ns) / 2 / self.median_ns if self.median_ns else 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Rounds: at least `least_rounds`, at most `most_rounds`, in between what fits `case_s` seconds. Before them the call
    runs until `warm_up_s` have passed, at least once."""

    case_s: float = 0.4
    warm_up_s: float = 0.05
    least_rounds: int = 5
    most_rounds: int = 100


Agree = Callable[[float], float]
"""One value for all ranks of a run (`ranks.agreed`): where they meet in a call, all must make equally many."""


def alone(value: float) -> float:
    """What a single process agrees on with itself."""
    return value


def measure(clock: Clock, call: Call, policy: Policy = Policy(), agree: Agree = alone) -> Measured:
    """Time a call by the policy. The first calls (lazy loading, choice of algorithms, page faults) do not count."""
    warmed_ns, first_ns = 0.0, 0.0
    for _ in range(policy.most_rounds):
        first_ns = agree(clock.time_ns(call, 1)[0])
        warmed_ns += first_ns
        if warmed_ns >= policy.warm_up_s * 1e9:
            break
    affordable = int(policy.case_s * 1e9 / first_ns) if first_ns > 0 else policy.most_rounds
    rounds = min(max(affordable, policy.least_rounds), policy.most_rounds)
    return Measured.of(clock.time_ns(call, rounds))
