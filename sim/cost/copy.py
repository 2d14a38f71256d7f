"""Time of a copy between GPU and host: t = t0 + bytes / B over the host link, and what such copies share.

Source: COSTS.md 4 (a few sizes of single machines, not fitted).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from sim.cost.figures import Figure, Figures
from sim.cost.gpu import Gpu
from sim.cost.profile import flatten, read_yaml
from sim.program.kernels import CopyDirection

Direction = CopyDirection
NUMA_HALVES = 2
HOST_LINK = "host_link."
"""Before the name of a figure of host_links.yaml, in a profile of one's own."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """A latency, then `bytes` as a flow of at most `cap_bytes_per_s`."""

    latency_ns: int
    bytes: int
    cap_bytes_per_s: float

    @property
    def alone_ns(self) -> float:
        return self.latency_ns + self.bytes / self.cap_bytes_per_s * 1e9


def copy_cost(figures: Figures, size_bytes: int, direction: Direction, pinned: bool = True) -> CopyCost:
    """Cost of a copy of `size_bytes`; unpinned host memory is staged and several times slower."""
    bandwidth = figures[f"copy.{direction}_gb_per_s"] * 1e9
    if not pinned:
        bandwidth *= figures["copy.pageable_fraction"]
    return CopyCost(round(figures["copy.fixed_us"] * 1e3), size_bytes, bandwidth)


@dataclass(frozen=True, slots=True)
class HostLinks:
    """Capacities between one GPU and its host, in bytes/s: each direction, and both together.

    `shared`: the least of what one link carries both ways and this GPU's part of its NUMA half of host memory, all
    GPUs of the node copying alike.
    """

    device_to_host_bytes_per_s: float
    host_to_device_bytes_per_s: float
    shared_bytes_per_s: float
    step_bytes_per_s: float
    """Memory traffic of an optimizer that every rank of the node runs on the CPU at the same time."""


def host_links(figures: Figures, gpu: Gpu, gpus_per_node: int) -> HostLinks:
    """The links of one of `gpus_per_node` GPUs that copy at the same time."""
    down, up = (figures[f"copy.{way}_gb_per_s"] * 1e9 for way in ("device_to_host", "host_to_device"))
    measured = {name.removeprefix(HOST_LINK): f for name, f in figures if name.startswith(HOST_LINK)}
    host = Figures("host_links.yaml", {**dict(host_figures(gpu)), **measured})
    if "gpu_gb_per_s" in host:
        sharing = 2 if "shared by two" in gpu.host_link else 1
        memory = host["gpu_gb_per_s"] * 1e9 / sharing
    else:
        sharing = gpus_per_node
        memory = host["half_gb_per_s"] * 1e9 / -(-gpus_per_node // NUMA_HALVES)
    step = host["node_step_gb_per_s"] * 1e9 / sharing
    return HostLinks(down, up, min(max(down, up) * host["both_directions"], memory), step)


def host_figures(gpu: Gpu) -> Iterator[tuple[str, Figure]]:
    """The figures of `host_links.yaml` for the generation of a GPU's host link."""
    yield from _host_figures(_generation(gpu.host_link))


def _generation(link: str) -> str:
    """PCIe by its number, 4 where there is none (cards on other links are taken for their contemporaries)."""
    if "C2C" in link:
        return "c2c"
    number = next((character for character in link.partition("PCIe")[2] if character.isdigit()), "4")
    return f"pcie-{min(max(int(number), 3), 5)}"


@cache
def _host_figures(generation: str) -> tuple[tuple[str, Figure], ...]:
    return tuple(flatten("host_links.yaml", read_yaml("host_links.yaml")[generation]))
