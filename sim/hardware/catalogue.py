"""What it runs on: GPUs and clusters, from `catalogue.yaml`.

Every figure has a source and a label: datasheet, published, assumed, or given (by the user). Links are per direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ruamel.yaml import YAML

from sim.hardware.drives import USUAL, Drives, usual_drives
from sim.units import parse_bandwidth, parse_bytes, parse_compute

Label = Literal["datasheet", "published", "assumed", "given"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from, and how far to trust it."""

    label: Label
    text: str


DATASHEET = Source("datasheet", "vendor data sheet")
GIVEN = Source("given", "set in the scenario")
HOST_MEMORY_PER_GPU_BYTES = 256 << 30
HOST_MEMORY = Source("assumed", "256 GiB per GPU, as the usual 2 TiB of a node with eight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The usual machine around a GPU: `nics` adapters of `nic_bytes_per_s` each (one direction) for `gpus` GPUs."""

    gpus: int
    nics: int
    nic_bytes_per_s: int

    @property
    def network_bytes_per_s(self) -> int:
        """One GPU's share of the node's adapters, one direction."""
        return self.nics * self.nic_bytes_per_s // self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device as PyTorch sees it. `sources` names each figure by its field ("peaks.bf16" for a peak)."""

    name: str
    title: str
    aliases: tuple[str, ...]
    vendor: Literal["nvidia", "amd"]
    compute_capability: tuple[int, int]
    """As torch.cuda.get_device_capability reports it; AMD devices report theirs in the same form."""
    sms: int
    """Streaming multiprocessors (compute units on AMD)."""
    peaks: tuple[tuple[str, int], ...]
    """Dense FLOP/s by dtype, tensor cores where they exist."""
    memory_bytes: int
    """Nominal."""
    usable_memory_bytes: int
    """What cudaMemGetInfo calls total."""
    context_bytes: int
    """Device memory of one process's CUDA context, outside PyTorch's allocator."""
    communicator_bytes: int
    """Device memory of one NCCL communicator, outside PyTorch's allocator."""
    memory_bandwidth_bytes_per_s: int
    l2_bytes: int
    gpu_link: str
    """nvlink, nvlink bridge (pairs of cards only), infinity fabric, or none (peers talk over the host link)."""
    gpu_link_bytes_per_s: int
    """All links of one GPU together, one direction; 0 without any."""
    host_link: str
    host_link_bytes_per_s: int
    """One direction, before protocol overhead."""
    node: Node
    sources: tuple[tuple[str, Source], ...]

    def peak_flops_per_s(self, dtype: str) -> int:
        """Dense peak for "bf16", "fp16", "fp32", "fp8" or "fp4". Raises KeyError where the device has none (V100: bf16)."""
        return dict(self.peaks)[dtype]

    def source(self, figure: str) -> Source:
        """Source of a figure by its field name. Raises KeyError for a name that is no figure."""
        return dict(self.sources)[figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` equal machines of `gpus_per_node` GPUs; memory and network after the user's overrides."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    network_bytes_per_s: int
    """Between nodes, per GPU, one direction."""
    usable_memory_bytes: int
    context_bytes: int
    communicator_bytes: int
    host_memory_bytes: int
    """Main memory of one node."""
    drives: Drives
    """NVMe drives of one node."""
    sources: tuple[tuple[str, Source], ...] = ()
    """Sources of the last six figures."""

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def source(self, figure: str) -> Source:
        """Source of one of the cluster's own figures, or of the GPU's. Raises KeyError for a name that is no figure."""
        return dict(self.gpu.sources + self.sources)[figure]


class UnknownGpu(KeyError):
    """No GPU of that name or alias in the catalogue."""


def gpu_names() -> tuple[str, ...]:
    """Names in the catalogue, without aliases."""
    return tuple(_catalogue())


def gpu_aliases() -> Mapping[str, str]:
    """Every accepted spelling, with the name that it stands for."""
    return _aliases()


def find_gpu(name: str) -> Gpu:
    """The GPU called `name` or an alias of it; case and underscores do not matter. Raises UnknownGpu."""
    try:
        return _catalogue()[_aliases()[name.strip().lower().replace("_", "-").replace(" ", "-")]]
    except KeyError:
        raise UnknownGpu(name) from None


def make_cluster(
    gpu: Gpu,
    *,
    gpus_per_node: int | None = None,
    nodes: int = 1,
    network_bytes_per_s: int | None = None,
    usable_memory_bytes: int | None = None,
    context_bytes: int | None = None,
    communicator_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    drives: Drives | None = None,
) -> Cluster:
    """A cluster with the catalogue's figures where nothing else is given; `network_bytes_per_s` is per GPU."""
    given: dict[str, int | None] = {
        "network_bytes_per_s": network_bytes_per_s,
        "usable_memory_bytes": usable_memory_bytes,
        "context_bytes": context_bytes,
        "communicator_bytes": communicator_bytes,
        "host_memory_bytes": host_memory_bytes,
    }
    in_node = gpus_per_node or gpu.node.gpus
    default = {
        "network_bytes_per_s": gpu.node.network_bytes_per_s,
        "usable_memory_bytes": gpu.usable_memory_bytes,
        "context_bytes": gpu.context_bytes,
        "communicator_bytes": gpu.communicator_bytes,
        "host_memory_bytes": HOST_MEMORY_PER_GPU_BYTES * in_node,
    }
    figures = {key: default[key] if value is None else value for key, value in given.items()}
    known = {**dict(gpu.sources), "host_memory_bytes": HOST_MEMORY}
    sources = [(key, known[key] if value is None else GIVEN) for key, value in given.items()]
    sources.append(("drives", Source("assumed", USUAL) if drives is None else GIVEN))
    drives = drives or usual_drives(in_node)
    return Cluster(gpu=gpu, gpus_per_node=in_node, nodes=nodes, drives=drives, sources=tuple(sources), **figures)


@cache
def _catalogue() -> dict[str, Gpu]:
    text = files("sim.hardware").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    data = YAML(typ="safe", pure=True).load(text)
    return {name: _read_gpu(name, data["defaults"], entry) for name, entry in data["gpus"].items()}


@cache
def _aliases() -> dict[str, str]:
    spellings = {name: name for name in _catalogue()}
    for name, gpu in _catalogue().items():
        for alias in gpu.aliases:
            if spellings.setdefault(alias, name) != name:
                raise ValueError(f"catalogue.yaml: alias {alias} stands for {spellings[alias]} and {name}")
    return spellings


def _read_gpu(name: str, defaults: dict[str, Any], entry: dict[str, Any]) -> Gpu:
    sources: dict[str, Source] = {}

    def figure(field: str, value: Any) -> Any:
        """The value of a plain or a labelled figure; its source is noted under `field`."""
        if not isinstance(value, dict):
            sources[field] = DATASHEET
            return value
        sources[field] = Source(value["label"], value["source"])
        return value["value"]

    peaks = tuple((dtype, parse_compute(figure(f"peaks.{dtype}", peak))) for dtype, peak in entry["peaks"].items())
    node = entry["node"]
    sources["network_bytes_per_s"] = Source(defaults["network"]["label"], defaults["network"]["source"])
    context = entry.get("context_memory", defaults["context_memory"])
    communicator = entry.get("communicator_memory", defaults["communicator_memory"])
    return Gpu(
        name=name,
        title=entry["title"],
        aliases=tuple(entry.get("aliases", ())),
        vendor=entry.get("vendor", "nvidia"),
        compute_capability=(entry["compute_capability"][0], entry["compute_capability"][1]),
        sms=figure("sms", entry["sms"]),
        peaks=peaks,
        memory_bytes=parse_bytes(figure("memory_bytes", entry["memory"])),
        usable_memory_bytes=parse_bytes(figure("usable_memory_bytes", entry["usable_memory"])),
        context_bytes=parse_bytes(figure("context_bytes", context)),
        communicator_bytes=parse_bytes(figure("communicator_bytes", communicator)),
        memory_bandwidth_bytes_per_s=parse_bandwidth(figure("memory_bandwidth_bytes_per_s", entry["memory_bandwidth"])),
        l2_bytes=parse_bytes(figure("l2_bytes", entry["l2"])),
        gpu_link=entry["gpu_link"]["kind"],
        gpu_link_bytes_per_s=parse_bandwidth(figure("gpu_link_bytes_per_s", entry["gpu_link"]["bandwidth"])),
        host_link=entry["host_link"]["kind"],
        host_link_bytes_per_s=parse_bandwidth(figure("host_link_bytes_per_s", entry["host_link"]["bandwidth"])),
        node=Node(gpus=node["gpus"], nics=node["nics"], nic_bytes_per_s=parse_bandwidth(node["nic_bandwidth"])),
        sources=tuple(sources.items()),
    )
