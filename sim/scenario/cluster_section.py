"""The section `cluster`."""

from __future__ import annotations

from sim.scenario.kinds import Bandwidth, Bytes, Gpus, Memory, Nodes
from sim.scenario.section import Section


class ClusterSection(Section):
    """What it runs on: equal nodes of one kind of GPU. Figures that are not given come from the catalogue."""

    gpu: str
    """A GPU of the catalogue by name or alias, e.g. h100-sxm-80gb."""
    gpus_per_node: Gpus | None = None
    """Default: the usual number for this GPU; 1 if there is one node and nothing in `parallel`."""
    nodes: Nodes = 1
    """Number of machines. Default: 1."""
    usable_memory: Memory | None = None
    """Device memory that cudaMemGetInfo calls total, e.g. 79.1 GiB. Default: the catalogue's."""
    context_memory: Bytes | None = None
    """Device memory of a process's CUDA context, outside PyTorch. Default: the catalogue's assumption."""
    communicator_memory: Bytes | None = None
    """Device memory of each NCCL communicator, outside PyTorch. Default: the catalogue's assumption."""
    host_memory: Bytes | None = None
    """Main memory of one node, shared by its GPUs, e.g. 2 TiB. Default: 256 GiB per GPU, assumed."""
    nvme: Bytes | None = None
    """What the drives of one node hold together, for what is offloaded to them, e.g. 30 TB. Default: 3.84 TB per GPU,
    assumed."""
    nvme_read: Bandwidth | None = None
    """How fast the drives of one node are read together, shared by its GPUs, e.g. 25 GB/s. Default: 6.8 GB/s per GPU,
    assumed."""
    nvme_write: Bandwidth | None = None
    """How fast they are written. Default: 4 GB/s per GPU, assumed."""
    network: Bandwidth | None = None
    """Network between nodes per GPU and direction, e.g. 400 Gb/s. Default: the catalogue's assumption."""
