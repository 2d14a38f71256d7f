"""Time of a fused attention kernel: work of its 128-row query tiles over the SMs.

    forward:  t = t0 + max(sum of tile work / SM, longest tile, bytes / (eta BW))
    work of one tile = 4 * 128 * D * (keys + sfix) / (E peak / SM);  keys = those its last row sees (causal), else Sk
    backward: the same with 2.5/.83 = 3.0 times the forward's work (2.5 times the FLOPs at .83 of the rate)

B*A*ceil(Sq/128) tiles for B sequences and A heads; fewer key/value heads save bytes, not work. Source: COSTS.md 2.
Figures with `spans_backward` are rates of forward + backward together (the charts of the FlashAttention README): 3.5
times the forward's FLOPs then take 3.5 / E, which is shared as 1 : 3.0, so the pair's time is the chart's.
Generations: triton (FlashAttention 1), flash2, flash3, efficient (xFormers), math (attention written out in PyTorch,
priced as one kernel: `skips_masked: 0`, it computes the masked half too). Kernels pad a head dimension to the next
multiple of 8, and charge what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from sim.cost.figures import CostError, Figures, unknown
from sim.cost.gpu import Gpu, peak_flops_per_ns
from sim.program.kernels import Attention

TILE_ROWS = 128
BACKWARD_FLOPS_RATIO = 2.5


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """What each bound asks, in ns; total = fixed + the largest."""

    tiles: int
    bytes: int
    work_ns: float
    longest_tile_ns: float
    memory_ns: float
    fixed_ns: float

    @property
    def bound(self) -> str:
        bounds = {"tensor cores": self.work_ns, "longest tile": self.longest_tile_ns, "memory": self.memory_ns}
        return max(bounds, key=lambda name: bounds[name])

    @property
    def total_ns(self) -> float:
        return self.fixed_ns + max(self.work_ns, self.longest_tile_ns, self.memory_ns)


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Constants of one generation and head dimension: `efficiency` E, `fixed_keys` sfix, t0 and the backward's rate."""

    gpu: Gpu
    efficiency: float
    fixed_keys: float
    fixed_ns: float
    backward_rate_ratio: float
    spans_backward: bool
    bandwidth_efficiency: float
    skips_masked: bool = True

    @classmethod
    def of(cls, figures: Figures, gpu: Gpu, work: Attention) -> AttentionForm:
        """The form for `work`'s generation and head dimension (the next larger one listed, as kernels pad).

        Raises CostError for a generation without figures.
        """
        root, head_dim = attention_root(figures, work)
        return cls(
            gpu=gpu,
            efficiency=figures[f"{root}.d{head_dim}.efficiency"],
            fixed_keys=figures[f"{root}.d{head_dim}.fixed_keys"],
            fixed_ns=figures[f"{root}.fixed_us"] * 1e3,
            backward_rate_ratio=figures[f"{root}.backward_rate_ratio"],
            spans_backward=figures[f"{root}.spans_backward"] != 0,
            bandwidth_efficiency=figures["gemm.bandwidth_efficiency"],
            skips_masked=figures.get(f"{root}.skips_masked", 1.0) != 0,
        )

    @property
    def backward_time_ratio(self) -> float:
        """Backward time over forward time."""
        return BACKWARD_FLOPS_RATIO / self.backward_rate_ratio

    @property
    def forward_efficiency(self) -> float:
        """E of the forward alone."""
        if not self.spans_backward:
            return self.efficiency
        return self.efficiency * (1 + self.backward_time_ratio) / (1 + BACKWARD_FLOPS_RATIO)

    def time(self, work: Attention) -> AttentionTime:
        sm_flops_per_ns = self.forward_efficiency * peak_flops_per_ns(self.gpu, work.dtype) / self.gpu.sms
        factor = self.backward_time_ratio if work.backward else 1.0
        ns_per_key = factor * 4 * TILE_ROWS * padded_head_dim(work) / sm_flops_per_ns
        keys = keys_per_tile(work, self.skips_masked)
        heads = work.batch * work.heads
        tiles_ns = heads * (sum(keys) + len(keys) * self.fixed_keys) * ns_per_key
        bandwidth = self.bandwidth_efficiency * self.gpu.memory_bandwidth_bytes_per_s
        return AttentionTime(
            tiles=heads * len(keys),
            bytes=work.bytes,
            work_ns=tiles_ns / self.gpu.sms,
            longest_tile_ns=(max(keys) + self.fixed_keys) * ns_per_key,
            memory_ns=work.bytes / bandwidth * 1e9,
            fixed_ns=self.fixed_ns,
        )


def attention_root(figures: Figures, work: Attention) -> tuple[str, int]:
    """Prefix of the generation's figures, and the head dimension whose figures hold for `work`.

    Raises CostError for a generation without figures.
    """
    known = figures.under("attention")
    if work.generation not in known:
        raise CostError(unknown("attention generation", work.generation, known, where=figures.owner))
    root = f"attention.{work.generation}"
    head_dims = sorted(int(part[1:]) for part in figures.under(root) if part[1:].isdigit())
    return root, next((d for d in head_dims if d >= work.head_dim), head_dims[-1])


def padded_head_dim(work: Attention) -> int:
    """The head dimension that the kernel computes: the next multiple of 8 elements."""
    return ceil(work.head_dim / 8) * 8


def keys_per_tile(work: Attention, skips_masked: bool = True) -> list[int]:
    """Keys that each 128-row query tile of one head reads: up to the diagonal where causal (aligned at the start)."""
    tiles = ceil(work.q_len / TILE_ROWS)
    if not (work.causal and skips_masked):
        return [work.kv_len] * tiles
    return [min((tile + 1) * TILE_ROWS, work.kv_len) for tile in range(tiles)]
