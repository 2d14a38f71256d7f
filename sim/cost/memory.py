"""Time of a memory-bound kernel: t = t0 + bytes / (eta BW), with eta and t0 by family. Source: COSTS.md 3.

A profile of one's own may have both for a single kernel, e.g. memory.elementwise.aten::gelu.bandwidth_efficiency: on a
CPU kernels of one family differ by what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.figures import CostError, Figures, unknown
from sim.cost.gpu import Gpu
from sim.program.kernels import Memory


@dataclass(frozen=True, slots=True)
class MemoryTime:
    """Times in ns; bytes are reads + writes."""

    bytes: int
    memory_ns: float
    fixed_ns: float

    @property
    def bound(self) -> str:
        return "memory" if self.memory_ns >= self.fixed_ns else "fixed"

    @property
    def total_ns(self) -> float:
        return self.fixed_ns + self.memory_ns


@dataclass(frozen=True, slots=True)
class MemoryForm:
    """One family's share eta of the datasheet bandwidth and its fixed time t0."""

    gpu: Gpu
    bandwidth_efficiency: float
    fixed_ns: float

    @classmethod
    def of(cls, figures: Figures, gpu: Gpu, family: str, kernel: str = "") -> MemoryForm:
        """Raises CostError for a family without figures."""
        known = figures.under("memory")
        if family not in known:
            raise CostError(unknown("memory family", family, known, where=figures.owner))
        root = memory_root(figures, family, kernel)
        eta, fixed_us = figures[f"{root}.bandwidth_efficiency"], figures[f"{root}.fixed_us"]
        return cls(gpu=gpu, bandwidth_efficiency=eta, fixed_ns=fixed_us * 1e3)

    def time(self, work: Memory) -> MemoryTime:
        bandwidth = self.bandwidth_efficiency * self.gpu.memory_bandwidth_bytes_per_s
        return MemoryTime(bytes=work.bytes, memory_ns=work.bytes / bandwidth * 1e9, fixed_ns=self.fixed_ns)


def memory_root(figures: Figures, family: str, kernel: str = "") -> str:
    """Prefix of the figures of a kernel: its own where there are some, else its family's."""
    own = f"memory.{family}.{kernel}"
    return own if f"{own}.bandwidth_efficiency" in figures else f"memory.{family}"
