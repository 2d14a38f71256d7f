"""The facts that scale a time: the catalogue's where the device is in it, else what the points themselves show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.measure.points import TimedPoint
from sim.cost.gpu import Gpu
from sim.cost.own import own_device
from sim.hardware.catalogue import find_gpu
from sim.program.kernels import Gemm, Memory

TITLES = (
    (r"GH200 144G", "gh200-144gb"),
    (r"GH200", "gh200-96gb"),
    (r"GB300", "gb300-288gb"),
    (r"B300", "b300-sxm-288gb"),
    (r"GB200", "gb200-186gb"),
    (r"B200", "b200-sxm-180gb"),
    (r"H200(?! NVL)", "h200-sxm-141gb"),
    (r"H100 NVL", "h100-nvl-94gb"),
    (r"H100 PCIe", "h100-pcie-80gb"),
    (r"H100 80GB HBM3", "h100-sxm-80gb"),
    (r"H800(?! PCIe)", "h800-sxm-80gb"),
    (r"H20(?!\d|-3e| NVL)", "h20-sxm-96gb"),
    (r"A800-SXM.*80GB", "a800-sxm-80gb"),
    (r"A100-SXM4-40GB", "a100-sxm-40gb"),
    (r"A100-SXM.*80GB", "a100-sxm-80gb"),
    (r"A100.*80GB PCIe|A100-PCIE-80GB", "a100-pcie-80gb"),
    (r"V100-SXM2-32GB|V100-SXM3-32GB", "v100-sxm-32gb"),
    (r"V100-PCIE-32GB", "v100-pcie-32gb"),
    (r"L40S", "l40s-48gb"),
    (r"A10G", "a10g-24gb"),
    (r"RTX PRO 6000(?!.*(Max-Q|Laptop))", "rtxpro6000-96gb"),
    (r"RTX A6000", "a6000-48gb"),
    (r"RTX 5090(?! Laptop)", "rtx5090-32gb"),
    (r"RTX 4090(?! Laptop)", "rtx4090-24gb"),
    (r"RTX 3090(?! Ti)", "rtx3090-24gb"),
    (r"RTX 4070 Ti SUPER", "rtx4070tis-16gb"),
    (r"RTX 5060 Ti", "rtx5060ti-16gb"),
    (r"MI300X", "mi300x-192gb"),
)
"""What torch.cuda calls a card, as a pattern, and its name in the catalogue; the first match counts."""
LARGE_BYTES = 32 << 20
"""From which a pass over memory shows the memory's bandwidth, not a cache's."""
LARGE_FLOPS = 1e8
"""From which a product shows a rate of the device; of a smaller one it is mostly what starting it takes."""
DEFAULT_RATES = (1e11, 1e10)
"""FLOP/s and bytes/s of a device of which neither products nor passes over memory were measured. A device of which only
small products were is as fast as this at least."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The device as the forms see it, and its entry in the profile."""

    gpu: Gpu
    entry: dict[str, Any]

    @property
    def catalogued(self) -> bool:
        return "gpu" in self.entry

    @property
    def is_cpu(self) -> bool:
        return self.entry.get("kind") == "cpu"


def catalogue_name(title: str) -> str | None:
    """The catalogue's name of a card that torch calls `title`."""
    return next((name for pattern, name in TITLES if re.search(pattern, title)), None)


def facts_of(info: Mapping[str, Any], points: Sequence[TimedPoint]) -> Facts:
    """Facts of the device that `info` describes."""
    name = (info.get("gpu") or catalogue_name(str(info["title"]))) if info["kind"] == "cuda" else None
    if name is not None:
        return Facts(find_gpu(name), {"gpu": name, "title": info["title"]})
    peaks: dict[str, float] = {}
    large: set[str] = set()
    bandwidth = 0.0
    for point in points:
        per_s = 1e9 / point.measured.median_ns
        if isinstance(point.work, Gemm):
            dtype = point.work.dtype
            peaks[dtype] = max(peaks.get(dtype, 0.0), point.work.flops * per_s)
            large |= {dtype} if point.work.flops >= LARGE_FLOPS else set()
        elif isinstance(point.work, Memory) and point.work.bytes >= LARGE_BYTES:
            bandwidth = max(bandwidth, point.work.bytes * per_s)
    if not bandwidth:
        passes = (p for p in points if isinstance(p.work, Memory))
        bandwidth = max((p.work.bytes * 1e9 / p.measured.median_ns for p in passes), default=DEFAULT_RATES[1])
    peaks = {dtype: peak if dtype in large else max(peak, DEFAULT_RATES[0]) for dtype, peak in peaks.items()}
    entry = {
        "name": info["title"],
        "kind": info["kind"],
        "sms": int(info["sms"]),
        "peaks": {dtype: _rounded(peak) for dtype, peak in peaks.items()} or {"fp32": DEFAULT_RATES[0]},
        "memory_bandwidth_bytes_per_s": _rounded(bandwidth),
        "host_link_bytes_per_s": _rounded(bandwidth),
    }
    return Facts(own_device(entry), entry)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
