"""GPUs as the cost forms see them, placements, and the measured files where they are present."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sim.program.kernels import Kernel, Work


@dataclass(frozen=True)
class FakeNode:
    network_bytes_per_s: float = 50e9


@dataclass(frozen=True)
class FakeGpu:
    name: str
    sms: int
    peaks: dict[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    gpu_link: str = "nvlink"
    gpu_link_bytes_per_s: float = 450e9
    host_link_bytes_per_s: float = 63e9
    node: FakeNode = FakeNode()
    host_link: str = "PCIe 5 x16"

    def peak_flops_per_s(self, dtype: str) -> float:
        return self.peaks[dtype]


@dataclass(frozen=True)
class Group:
    size: int
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        return self.size // self.nodes


H100 = FakeGpu("h100-sxm-80gb", 132, {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp8": 1978.9e12}, 3350e9)
A100 = FakeGpu(
    "a100-sxm-80gb",
    108,
    {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    2039e9,
    gpu_link_bytes_per_s=300e9,
    host_link="PCIe 4 x16",
    host_link_bytes_per_s=31.5e9,
    node=FakeNode(25e9),
)
TEN_SMS = FakeGpu("ten-sms", 10, {"bf16": 1e13, "fp32": 1e12}, 1000e9)
"""1000 FLOP/ns per SM in bf16, 1000 bytes/ns of memory: arithmetic that fits on paper."""


def kernel(work: Work) -> Kernel:
    return Kernel("kernel", work)


def measured(file_name: str) -> Path:
    """A file of published kernel measurements; skips the test where the shared data are not present."""
    root = Path(os.environ.get("SIM_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    path = root / "data" / "kernels" / file_name
    if not path.exists():
        pytest.skip(f"published measurements not present: {file_name}")
    return path
