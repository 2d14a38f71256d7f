"""The attention form of `sim.cost.attention` over whole tables at once; a test holds the two equal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from calibration.fit.evidence import Floats, Mask
from sim.cost.attention import TILE_ROWS, AttentionForm
from sim.cost.gpu import peak_flops_per_ns


@dataclass(frozen=True, slots=True)
class Heads:
    """Self-attention of `heads` (batch included) over `length` tokens each: arrays [rows]; `bytes` as the kernel
    reads and writes them once."""

    heads: Floats
    length: Floats
    head_dim: Floats
    causal: Mask
    bytes: Floats

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Heads:
        """From columns b, s, h, hkv, d and causal; 16 bit."""
        size = 2.0 * rows.b * rows.s * rows.d * (2 * rows.h + 2 * rows.hkv)
        heads, length, head_dim = (np.asarray(c, float) for c in (rows.b * rows.h, rows.s, rows.d))
        return cls(heads, length, head_dim, np.asarray(rows.causal, bool), np.asarray(size, float))

    def where(self, mask: Mask) -> Heads:
        return replace(
            self, heads=self.heads[mask], length=self.length[mask], head_dim=self.head_dim[mask],
            causal=self.causal[mask], bytes=self.bytes[mask],
        )  # fmt: skip

    @property
    def flops(self) -> Floats:
        """Forward, the causal half where causal."""
        whole = 4 * self.heads * self.length**2 * self.head_dim
        return np.where(self.causal, whole / 2, whole)


def attention_ns(form: AttentionForm, work: Heads, backward: bool = False) -> Floats:
    """Times of all rows in ns."""
    rate = form.efficiency * peak_flops_per_ns(form.gpu, "fp16") / form.gpu.sms
    factor = form.backward_time_ratio if backward else 1.0
    ns_per_key = factor * 4 * TILE_ROWS * np.ceil(work.head_dim / 8) * 8 / rate
    tiles = np.ceil(work.length / TILE_ROWS)
    triangle = TILE_ROWS * tiles * (tiles - 1) / 2 + work.length
    masked = tiles * work.length - triangle
    keys = triangle + np.where(work.causal, form.masked_share, 1.0) * masked
    work_ns = work.heads * keys * ns_per_key / form.gpu.sms
    first = np.minimum(TILE_ROWS, work.length)  # the longest tile where masked keys cost more than visible ones
    longest = np.where(work.causal, first + form.masked_share * (work.length - first), 0.0)
    longest_ns = np.maximum(work.length, longest) * ns_per_key
    tensor_ns = np.maximum(work_ns, longest_ns) + form.tail_share * np.minimum(work_ns, longest_ns)
    bytes_per_ns = form.bandwidth_efficiency * form.gpu.memory_bandwidth_bytes_per_s / 1e9
    return np.asarray(form.fixed_ns + tensor_ns + work.bytes * (2 if backward else 1) / bytes_per_ns)
