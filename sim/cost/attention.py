"""Time of a fused attention kernel: work of its 128-row query tiles over the SMs, a tail, and the bytes moved.

    forward:  t = t0 + max(W, L) + tail * min(W, L) + bytes / (eta BW)
    W = sum of tile work / SM,  L = longest tile
    work of one tile = 4 * 128 * D * keys / (E peak / SM);  keys = those its last row sees (causal), else Sk
    backward: W and L 2.5/.83 = 3.0 times the forward's (2.5 times the FLOPs at .83 of the rate), twice the bytes

B*A*ceil(Sq/128) tiles for B sequences and A heads; fewer key/value heads save bytes, not work. E is the rate of the
forward. COSTS.md 2 takes the larger of work and bytes and a fixed number of keys per tile; scored on held-out points,
adding the bytes and a tail (tiles of a causal mask are uneven, the longest come last) makes errors smaller on every
GPU, and the fixed keys then fit to nothing (docs/profiles.md).

Generations: triton (FlashAttention 1), flash2, flash3, cudnn, efficient (xFormers), math (attention written out in
PyTorch, priced as one kernel; `masked_share`: it computes the masked half too, and pays for masking). Kernels pad a
head dimension to the next multiple of 8, and charge what they compute.
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
    """The parts of the time in ns. `tail_share` of the smaller of work and longest tile adds to the larger."""

    tiles: int
    bytes: int
    work_ns: float
    longest_tile_ns: float
    tail_share: float
    memory_ns: float
    fixed_ns: float

    @property
    def bound(self) -> str:
        bounds = {"tensor cores": self.work_ns, "longest tile": self.longest_tile_ns, "memory": self.memory_ns}
        return max(bounds, key=lambda name: bounds[name])

    @property
    def tensor_ns(self) -> float:
        """Work and tail."""
        small, large = sorted((self.work_ns, self.longest_tile_ns))
        return large + self.tail_share * small

    @property
    def total_ns(self) -> float:
        return self.fixed_ns + self.tensor_ns + self.memory_ns


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Constants of one generation and head dimension: E, t0, eta, the tail and the backward's rate over E."""

    gpu: Gpu
    efficiency: float
    fixed_ns: float
    bandwidth_efficiency: float
    tail_share: float
    backward_rate_ratio: float
    masked_share: float = 0.0
    """Cost of a masked key over that of a visible one; 0 where the kernel skips masked tiles."""

    @classmethod
    def of(cls, figures: Figures, gpu: Gpu, work: Attention) -> AttentionForm:
        """The form for `work`'s generation and head dimension (the next larger one listed, as kernels pad).

        Raises CostError for a generation without figures.
        """
        root, head_dim = attention_root(figures, work)
        own = f"{root}.d{head_dim}"
        return cls(
            gpu=gpu,
            efficiency=figures[f"{own}.efficiency"],
            fixed_ns=figures[f"{own}.fixed_us"] * 1e3,
            bandwidth_efficiency=figures[f"{own}.bandwidth_efficiency"],
            tail_share=figures[f"{own}.tail_share"],
            backward_rate_ratio=figures[f"{root}.backward_rate_ratio"],
            masked_share=figures.get(f"{own}.masked_share", 0.0),
        )

    @property
    def backward_time_ratio(self) -> float:
        """Backward work over forward work, in time."""
        return BACKWARD_FLOPS_RATIO / self.backward_rate_ratio

    def time(self, work: Attention) -> AttentionTime:
        sm_flops_per_ns = self.efficiency * peak_flops_per_ns(self.gpu, work.dtype) / self.gpu.sms
        factor = self.backward_time_ratio if work.backward else 1.0
        ns_per_key = factor * 4 * TILE_ROWS * padded_head_dim(work) / sm_flops_per_ns
        keys = keys_per_tile(work, self.masked_share)
        heads = work.batch * work.heads
        bandwidth = self.bandwidth_efficiency * self.gpu.memory_bandwidth_bytes_per_s
        return AttentionTime(
            tiles=heads * len(keys),
            bytes=work.bytes,
            work_ns=heads * sum(keys) * ns_per_key / self.gpu.sms,
            longest_tile_ns=max(keys) * ns_per_key,
            tail_share=self.tail_share,
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
    return ceil(work.mean_head_dim / 8) * 8


def keys_per_tile(work: Attention, masked_share: float = 0.0) -> list[float]:
    """Keys that each 128-row query tile of one head pays for: up to the diagonal where causal (which begins after
    `past` keys), from its first row's window on, and `masked_share` of the others."""
    tiles = ceil(work.q_len / TILE_ROWS)
    if not work.causal:
        return [work.kv_len] * tiles
    visible = [min(work.past + (tile + 1) * TILE_ROWS, work.kv_len) for tile in range(tiles)]
    if work.window:
        visible = [min(keys, work.window - 1 + TILE_ROWS) for keys in visible]
    return [keys + masked_share * (work.kv_len - keys) for keys in visible] if masked_share else [*visible]
