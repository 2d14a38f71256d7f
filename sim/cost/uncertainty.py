"""How far may a duration be off? Relative sigmas of figures, weighted by the part of the time that each decides.

The sigma of a figure is the spread between sources that measured the same kernels (COSTS.md 1.3), so it is shared by
all kernels that the figure prices: within a family errors add up, they do not average out. Errors of single shapes do
average out over the kernels of a step and are not counted here.
"""

from __future__ import annotations

from math import hypot

from sim.cost.attention import AttentionTime, attention_root
from sim.cost.collective import CollectiveCost, Placement, figure_names
from sim.cost.figures import Figures
from sim.cost.gemm import GemmTime, gemm_root, is_misaligned
from sim.cost.memory import MemoryTime, memory_root
from sim.program.kernels import Attention, Collective, Gemm, Memory


def gemm_sigma(figures: Figures, work: Gemm, time: GemmTime) -> float:
    """Relative sigma of a matrix product's time."""
    root = gemm_root(figures, work.dtype)
    rate = "efficiency" if time.bound == "tensor cores" else "bandwidth_efficiency"
    bound = figures.sigma(f"{root}.{rate}")
    if is_misaligned(work) and time.bound == "tensor cores":
        rule = "misaligned_slowdown" if work.batch > 1 else "misaligned_row_slowdown"
        bound = hypot(bound, figures.sigma(f"gemm.{rule}"))
    return _weighted(time.total_ns, time.fixed_ns, figures.sigma(f"{root}.fixed_us"), bound)


def attention_sigma(figures: Figures, work: Attention, time: AttentionTime) -> float:
    """Relative sigma of a fused attention kernel's time."""
    root, head_dim = attention_root(figures, work)
    own = f"{root}.d{head_dim}"
    rate = figures.sigma(f"{own}.efficiency")
    if work.backward:
        rate = hypot(rate, figures.sigma(f"{root}.backward_rate_ratio"))
    memory, fixed = figures.sigma(f"{own}.bandwidth_efficiency"), figures.sigma(f"{own}.fixed_us")
    return hypot(time.tensor_ns * rate, time.memory_ns * memory, time.fixed_ns * fixed) / time.total_ns


def memory_sigma(figures: Figures, work: Memory, time: MemoryTime, kernel: str = "") -> float:
    """Relative sigma of a memory-bound kernel's time."""
    root = memory_root(figures, work.family, kernel)
    eta, fixed = figures.sigma(f"{root}.bandwidth_efficiency"), figures.sigma(f"{root}.fixed_us")
    return _weighted(time.total_ns, time.fixed_ns, fixed, eta)


def collective_sigma(figures: Figures, work: Collective, placement: Placement, cost: CollectiveCost) -> float:
    """Relative sigma of a collective's time; 0 for a group of one."""
    if work.size == 1:
        return 0.0
    latency, bandwidth = figure_names(figures, work, placement, cost)
    return _weighted(cost.alone_ns, cost.latency_ns, figures.sigma(latency), figures.sigma(bandwidth))


def _weighted(total_ns: float, fixed_ns: float, fixed_sigma: float, rest_sigma: float) -> float:
    """Sigma of the sum of a fixed part and a rest whose errors are unrelated."""
    if not total_ns:
        return 0.0
    return hypot(fixed_ns * fixed_sigma, (total_ns - fixed_ns) * rest_sigma) / total_ns
