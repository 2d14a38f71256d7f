"""Time of a matrix product: tiles in waves over the SMs, split-K, or the bytes moved.

    t = t0 + max(T_tensor, T_memory),  T_memory = bytes / (eta BW)
    T_tensor = min over tiles a, b in {64, 128, 256} (32 too in fp32), split s in {1, 2, 4, 8, 16} of
        ceil(batch ceil(M/a) ceil(N/b) s / SM) * 2 a b (K/s + K0) (1 + c (1/a + 1/b)) / (rate of one SM)
        + (s > 1) 8 s batch M N / (eta BW)                                  (fp32 partial sums written and read)
    rate of one SM = E peak / SM * (1 + c (1/256 + 1/128)), so E is the rate at a tile of 256 x 128 and large K.

Source: COSTS.md 1.1, fitted there to cuBLAS rows of ai-dynamo/aiconfigurator. `batch` multiplies the tile count (a
strided-batched product fills the SMs with tiles of all its members): assumed, and scored in docs/profiles.md against
batched rows that nothing was fitted to. Factors on T_tensor: 1 / accumulate_rate where the product adds into its output
(wgrad with fp32 accumulation is 4-5 % slower), and a slowdown where rows of 16 bit are no multiple of 8 elements and so
not 16-byte aligned: `misaligned_slowdown` of batched products (attention heads of odd size), `misaligned_row_slowdown`
of single ones (a vocabulary of 50,257), for which cuBLAS has kernels of smaller loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from sim.cost.figures import Figures
from sim.cost.gpu import Gpu, peak_flops_per_ns, tensor_peak_flops_per_ns
from sim.program.kernels import ITEM_BYTES, Gemm, packed_bytes

TILES = (64, 128, 256)
NARROW_TILES = (32, *TILES)
"""Of fp32 products, which run on CUDA cores: cuBLAS has kernels such as sgemm_128x32 and sgemm_32x32_sliced1x4."""
SPLITS = (1, 2, 4, 8, 16)
NARROW = ("fp8", "fp4")
SPLIT_BYTES_PER_OUTPUT = 8  # fp32 written by each split and read back by the reduction


@dataclass(frozen=True, slots=True)
class GemmTime:
    """The chosen tiling and what each bound asks. Times in ns; total = fixed + max(tensor, memory)."""

    tile_m: int
    tile_n: int
    split_k: int
    tiles: int
    waves: int
    bytes: int
    tensor_ns: float
    memory_ns: float
    fixed_ns: float

    @property
    def bound(self) -> str:
        return "tensor cores" if self.tensor_ns >= self.memory_ns else "memory"

    @property
    def total_ns(self) -> float:
        return self.fixed_ns + max(self.tensor_ns, self.memory_ns)


@dataclass(frozen=True, slots=True)
class GemmForm:
    """The form's constants: E, c, K0 and eta are fractions or counts, t0 is `fixed_ns`."""

    gpu: Gpu
    efficiency: float
    tile_edge_cost: float
    k_overhead: float
    fixed_ns: float
    bandwidth_efficiency: float
    accumulate_rate: float = 1.0
    misaligned_slowdown: float = 1.0
    misaligned_row_slowdown: float = 1.0

    @classmethod
    def of(cls, figures: Figures, gpu: Gpu, dtype: str = "bf16") -> GemmForm:
        """The form for products of `dtype`: fp8 and fp4 (in a profile of one's own any) have figures of their own if known."""
        root = gemm_root(figures, dtype)
        return cls(
            gpu=gpu,
            efficiency=figures[f"{root}.efficiency"],
            tile_edge_cost=figures[f"{root}.tile_edge_cost"],
            k_overhead=figures[f"{root}.k_overhead"],
            fixed_ns=figures[f"{root}.fixed_us"] * 1e3,
            bandwidth_efficiency=figures[f"{root}.bandwidth_efficiency"],
            accumulate_rate=figures.get("gemm.accumulate_rate", 1.0),
            misaligned_slowdown=figures.get("gemm.misaligned_slowdown", 1.0),
            misaligned_row_slowdown=figures.get("gemm.misaligned_row_slowdown", 1.0),
        )

    def time(self, work: Gemm) -> GemmTime:
        """The fastest tiling for `work`; the first in order of tile_m, tile_n, split among equals."""
        bytes_per_ns = self.bandwidth_efficiency * self.gpu.memory_bandwidth_bytes_per_s / 1e9
        moved_bytes = gemm_bytes(work)
        tensor_ns, tile_m, tile_n, split, tiles = min(
            (self._tiling_ns(work, a, b, s, bytes_per_ns), a, b, s, tile_count(work, a, b, s))
            for a in tiles_of(work)
            for b in tiles_of(work)
            for s in SPLITS
        )
        return GemmTime(
            tile_m=tile_m,
            tile_n=tile_n,
            split_k=split,
            tiles=tiles,
            waves=ceil(tiles / self.gpu.sms),
            bytes=moved_bytes,
            tensor_ns=tensor_ns,
            memory_ns=moved_bytes / bytes_per_ns,
            fixed_ns=self.fixed_ns,
        )

    def _sm_flops_per_ns(self, work: Gemm) -> float:
        """Rate of one SM at a tile of 256 x 128 and large K."""
        rate = self.efficiency * peak_flops_per_ns(self.gpu, work.dtype) / self.gpu.sms
        if work.accumulate:
            rate *= self.accumulate_rate
        if is_misaligned(work):
            rate /= self.misaligned_slowdown if work.batch > 1 else self.misaligned_row_slowdown
        return rate

    def _tiling_ns(self, work: Gemm, a: int, b: int, split: int, bytes_per_ns: float) -> float:
        c = self.tile_edge_cost
        sm_flops_per_ns = self._sm_flops_per_ns(work) * (1 + c * (1 / 256 + 1 / 128))
        k_overhead = self.k_overhead * overhead_share(self.gpu, work.dtype)
        tile_flops = 2 * a * b * (work.k / split + k_overhead) * (1 + c * (1 / a + 1 / b))
        ns = ceil(tile_count(work, a, b, split) / self.gpu.sms) * tile_flops / sm_flops_per_ns
        if split > 1:
            ns += SPLIT_BYTES_PER_OUTPUT * split * work.batch * work.m * work.n / bytes_per_ns
        return ns


class HasDtype(Protocol):
    """One product or a table of them."""

    @property
    def dtype(self) -> str: ...


def tiles_of(work: HasDtype) -> tuple[int, ...]:
    """Sides that a tile can have: tensor cores take no tiles narrower than 64."""
    return NARROW_TILES if work.dtype == "fp32" else TILES


def overhead_share(gpu: Gpu, dtype: str) -> float:
    """K0 counts the time of a tile's first loads and last stores in steps of K of 16-bit tensor cores. On CUDA cores (fp32)
    a step takes longer, that time does not: so many fewer steps."""
    return peak_flops_per_ns(gpu, "fp32") / tensor_peak_flops_per_ns(gpu) if dtype == "fp32" else 1.0


def gemm_root(figures: Figures, dtype: str) -> str:
    """Prefix of the figures for products of `dtype`: of its own where it was measured, else those of 16 bit."""
    return f"gemm.{dtype}" if f"gemm.{dtype}.efficiency" in figures else "gemm"


def is_misaligned(work: Gemm) -> bool:
    """A 16-bit product with rows that are no multiple of 8 elements (16 bytes). Of a batched one, all sides are rows."""
    if work.grouped or ITEM_BYTES.get(work.dtype) != 2:
        return False
    other = work.m if work.over_rows else work.k
    return any(side % 8 for side in ((work.n, other) if work.batch == 1 else (work.m, work.n, work.k)))


def tile_count(work: Gemm, tile_m: int, tile_n: int, split: int) -> int:
    """Tiles that the SMs share: of all batch members and all splits of K."""
    return work.batch * ceil(work.m / tile_m) * ceil(work.n / tile_n) * split


def gemm_bytes(work: Gemm) -> int:
    """Bytes read and written: both inputs, the output (16 bit for narrower inputs), C once more where it accumulates."""
    out = 2 if work.dtype in NARROW else ITEM_BYTES[work.dtype]
    inputs = packed_bytes(work.m * work.k + work.k * work.n, work.dtype)
    return work.batch * (inputs + out * work.m * work.n * (2 if work.accumulate else 1))
