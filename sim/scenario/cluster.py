"""From the section `cluster` to the machines that it means."""

from __future__ import annotations

from dataclasses import replace

from sim.hardware.catalogue import Cluster, UnknownGpu, find_gpu, gpu_names, make_cluster
from sim.hardware.drives import Drives, usual_drives
from sim.scenario.document import Document
from sim.scenario.schema import ClusterSection, ParallelSection
from sim.scenario.sections import EXPECTED, Sections

CHAIN_GPU = "h100-sxm-80gb"
"""Of a chain without a cluster."""


def resolve_cluster(
    document: Document, sections: Sections, parallel: ParallelSection, is_chain: bool
) -> Cluster | None:
    """The GPUs and machines, with the catalogue's figures where nothing is said; None where they cannot be told."""
    if "cluster" not in sections.by_name:
        return None
    section: ClusterSection | None = sections.get("cluster")
    if section is None and is_chain:
        section = ClusterSection(gpu=CHAIN_GPU, gpus_per_node=1)
    if section is None:
        document.problem(("cluster",), EXPECTED["missing"], show=False)
        return None
    try:
        gpu = find_gpu(section.gpu)
    except UnknownGpu:
        document.problem(("cluster", "gpu"), "", allowed=gpu_names())
        return None
    alone = parallel == ParallelSection() and section.nodes == 1
    gpus_per_node = section.gpus_per_node or (1 if alone else None)
    return make_cluster(
        gpu,
        gpus_per_node=gpus_per_node,
        nodes=section.nodes,
        network_bytes_per_s=section.network,
        usable_memory_bytes=section.usable_memory,
        context_bytes=section.context_memory,
        communicator_bytes=section.communicator_memory,
        host_memory_bytes=section.host_memory,
        drives=_drives(section, gpus_per_node or gpu.node.gpus),
    )


def _drives(section: ClusterSection, gpus_per_node: int) -> Drives | None:
    """None where nothing is said of them."""
    usual = usual_drives(gpus_per_node)
    given = {
        "read_bytes_per_s": section.nvme_read,
        "write_bytes_per_s": section.nvme_write,
        "capacity_bytes": section.nvme,
    }
    said = {name: value for name, value in given.items() if value is not None}
    return replace(usual, **said) if said else None
