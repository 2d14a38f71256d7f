"""Time of a copy between GPU and host: t = t0 + bytes / B over the host link.

Source: COSTS.md 4 (a few sizes of single machines, not fitted).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.cost.figures import Figures

Direction = Literal["host_to_device", "device_to_host"]


@dataclass(frozen=True, slots=True)
class CopyCost:
    """A latency, then `bytes` as a flow of at most `cap_bytes_per_s`."""

    latency_ns: int
    bytes: int
    cap_bytes_per_s: float

    @property
    def alone_ns(self) -> float:
        return self.latency_ns + self.bytes / self.cap_bytes_per_s * 1e9


def copy_cost(figures: Figures, size_bytes: int, direction: Direction, pinned: bool = True) -> CopyCost:
    """Cost of a copy of `size_bytes`; unpinned host memory is staged and several times slower."""
    bandwidth = figures[f"copy.{direction}_gb_per_s"] * 1e9
    if not pinned:
        bandwidth *= figures["copy.pageable_fraction"]
    return CopyCost(round(figures["copy.fixed_us"] * 1e3), size_bytes, bandwidth)
