"""What a cost form asks of a GPU: the datasheet facts that scale a time. `sim.hardware`'s Gpu has them."""

from __future__ import annotations

from typing import Protocol

from sim.cost.figures import CostError


class Network(Protocol):
    """The usual node around a GPU."""

    @property
    def network_bytes_per_s(self) -> float:
        """One GPU's share of the node's NICs."""
        ...


class Gpu(Protocol):
    """The facts that decide a duration. Bandwidths are per direction, decimal bytes/s."""

    @property
    def name(self) -> str: ...

    @property
    def sms(self) -> int:
        """Streaming multiprocessors."""
        ...

    @property
    def memory_bandwidth_bytes_per_s(self) -> float: ...

    @property
    def gpu_link(self) -> str:
        """nvlink, infinity fabric, nvlink bridge (pairs of cards only) or none."""
        ...

    @property
    def gpu_link_bytes_per_s(self) -> float: ...

    @property
    def host_link(self) -> str:
        """PCIe with its generation, e.g. "PCIe 5 x16", or NVLink-C2C."""
        ...

    @property
    def host_link_bytes_per_s(self) -> float: ...

    @property
    def node(self) -> Network: ...

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak of "bf16", "fp16", "fp32" (without TF32), "fp8" or "fp4". Raises KeyError where there is none."""
        ...


def peak_flops_per_ns(gpu: Gpu, dtype: str) -> float:
    """Dense peak. fp32 is full fp32: torch.backends.cuda.matmul.allow_tf32 is off unless asked for.

    Raises CostError for a dtype without a peak (bf16 on V100).
    """
    try:
        return gpu.peak_flops_per_s(dtype) / 1e9
    except KeyError:
        raise CostError(f"{gpu.name} has no {dtype} peak for matrix products") from None


def tensor_peak_flops_per_ns(gpu: Gpu) -> float:
    """The 16-bit peak: bf16, or fp16 where there is no bf16."""
    try:
        return peak_flops_per_ns(gpu, "bf16")
    except CostError:
        return peak_flops_per_ns(gpu, "fp16")


def fabric_bytes_per_s(gpu: Gpu) -> float:
    """What carries a collective among all GPUs of a node: NVLink or Infinity Fabric, else the host link.

    Bridges join only pairs of cards, so they do not count.
    """
    whole_node = gpu.gpu_link in ("nvlink", "infinity fabric")
    return gpu.gpu_link_bytes_per_s if whole_node else gpu.host_link_bytes_per_s
