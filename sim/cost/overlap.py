"""How much slower a kernel runs while something else runs on its GPU.

Level 2 (a collective): NCCL's kernels hold about 24 SMs, and compute is slower by

    1 + k * 24 / (SM - 24)

k = 1: the SMs are simply missing; above 1: bandwidth and power are missing too. Source: COSTS.md 6.2 and 8 (5).
Level 1 (a copy engine): no SM is taken; a memory-bound kernel loses the HBM bandwidth that the copy uses, one host
link's worth (assumed, or as overlap.copy_share of a profile of one's own; copies both ways would take two);
compute-bound kernels lose nothing.
A kernel of given duration (`Fixed`) keeps it at every level.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.figures import Figures
from sim.cost.gpu import Gpu
from sim.program.kernels import Fixed, Memory, Work

ALONE, COPY_ENGINE, COLLECTIVE = 0, 1, 2
LEVELS = (ALONE, COPY_ENGINE, COLLECTIVE)
MOST_COPY_SHARE = 0.5
"""A link that is faster than that (NVLink-C2C) shares the memory with the kernel evenly."""


@dataclass(frozen=True, slots=True)
class OverlapForm:
    """`nccl_sms` SMs taken by a collective, `slowdown` k, and the share of HBM bandwidth that one copy uses."""

    sms: int
    nccl_sms: float
    slowdown: float
    copy_share: float

    @classmethod
    def of(cls, figures: Figures, gpu: Gpu) -> OverlapForm:
        return cls(
            sms=gpu.sms,
            nccl_sms=figures["overlap.nccl_sms"],
            slowdown=figures["overlap.slowdown"],
            copy_share=figures.get("overlap.copy_share", _copy_share(figures, gpu)),
        )

    def factor(self, work: Work, level: int) -> float:
        """Contended time over alone time, at least 1. Raises ValueError for a level that does not exist."""
        if level not in LEVELS:
            raise ValueError(f"contention level {level}: one of 0 (alone), 1 (copy engine), 2 (collective)")
        if level == ALONE or isinstance(work, Fixed):
            return 1.0
        if level == COPY_ENGINE:
            return 1 / (1 - self.copy_share) if isinstance(work, Memory) else 1.0
        return 1 + self.slowdown * self.nccl_sms / (self.sms - self.nccl_sms)


def _copy_share(figures: Figures, gpu: Gpu) -> float:
    """What one way of the host link takes of the device's memory bandwidth; never all of it."""
    share = figures["copy.host_to_device_gb_per_s"] * 1e9 / gpu.memory_bandwidth_bytes_per_s
    return min(share, MOST_COPY_SHARE)
