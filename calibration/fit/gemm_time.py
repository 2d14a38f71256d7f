"""The GEMM form of `sim.cost.gemm` over whole tables at once; a test holds the two equal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.fit.evidence import Floats
from sim.cost.gemm import SPLIT_BYTES_PER_OUTPUT, SPLITS, GemmForm, overhead_share, tiles_of
from sim.cost.gpu import peak_flops_per_ns
from sim.program.kernels import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of one dtype: arrays m, n, k and batch [rows]."""

    m: Floats
    n: Floats
    k: Floats
    batch: Floats
    dtype: str = "bf16"
    accumulate: bool = False

    @classmethod
    def of(cls, rows: pd.DataFrame, dtype: str = "bf16", accumulate: bool = False) -> Products:
        """From columns m, n, k and perhaps batch."""
        batch = rows["batch"] if "batch" in rows else np.ones(len(rows))
        m, n, k, members = (np.asarray(c, float) for c in (rows["m"], rows["n"], rows["k"], batch))
        return cls(m, n, k, members, dtype, accumulate)

    def where(self, mask: npt.NDArray[np.bool_]) -> Products:
        return replace(self, m=self.m[mask], n=self.n[mask], k=self.k[mask], batch=self.batch[mask])

    @property
    def flops(self) -> Floats:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> Floats:
        item = ITEM_BYTES[self.dtype]
        out = (2 if self.dtype == "fp8" else item) * (2 if self.accumulate else 1)
        moved = item * (self.m * self.k + self.k * self.n) + out * self.m * self.n
        return np.asarray(self.batch * moved)


def gemm_ns(form: GemmForm, work: Products) -> Floats:
    """Times of all products in ns."""
    gpu, c = form.gpu, form.tile_edge_cost
    rate = form.efficiency * peak_flops_per_ns(gpu, work.dtype) / gpu.sms * (1 + c * (1 / 256 + 1 / 128))
    rate *= form.accumulate_rate if work.accumulate else 1.0
    bytes_per_ns = form.bandwidth_efficiency * gpu.memory_bandwidth_bytes_per_s / 1e9
    tensor_ns = np.full(len(work.m), np.inf)
    k_overhead = form.k_overhead * overhead_share(gpu, work.dtype)
    for a in tiles_of(work):
        for b in tiles_of(work):
            tiles = work.batch * np.ceil(work.m / a) * np.ceil(work.n / b)
            for s in SPLITS:
                tile_flops = 2 * a * b * (work.k / s + k_overhead) * (1 + c * (1 / a + 1 / b))
                ns = np.ceil(tiles * s / gpu.sms) * tile_flops / rate
                if s > 1:
                    ns += SPLIT_BYTES_PER_OUTPUT * s * work.batch * work.m * work.n / bytes_per_ns
                np.minimum(tensor_ns, ns, out=tensor_ns)
    return np.asarray(form.fixed_ns + np.maximum(tensor_ns, work.bytes / bytes_per_ns))
