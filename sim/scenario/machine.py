"""What a strategy runs on: the cluster, and the mesh of ranks laid over it."""

from __future__ import annotations

from dataclasses import replace

from sim.hardware.catalogue import Cluster, UnknownGpu, find_gpu, gpu_names, make_cluster
from sim.hardware.drives import Drives, usual_drives
from sim.hardware.mesh import Mesh, MeshError
from sim.scenario.cluster_section import ClusterSection
from sim.scenario.document import Document
from sim.scenario.experts import expert_mesh
from sim.scenario.schema import ParallelSection
from sim.scenario.sections import EXPECTED, Sections

CHAIN_GPU = "h100-sxm-80gb"
"""What a chain runs on where no cluster is given; its times are given, so only the memory matters."""


def resolve_cluster(
    document: Document, sections: Sections, parallel: ParallelSection, is_chain: bool
) -> Cluster | None:
    """The cluster of the section, or None with problems noted on the document."""
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
    given = {
        "read_bytes_per_s": section.nvme_read,
        "write_bytes_per_s": section.nvme_write,
        "capacity_bytes": section.nvme,
    }
    said = {name: value for name, value in given.items() if value is not None}
    return replace(usual_drives(gpus_per_node), **said) if said else None


def resolve_mesh(document: Document, parallel: ParallelSection, cluster: Cluster) -> Mesh | None:
    """Dimensions, outermost first; the ranks of a tensor-parallel group lie side by side, those of a context-parallel
    group next (Megatron's order tp-cp-dp-pp, torchtitan's pp, dp, cp, tp)."""
    fsdp, data, tensor, pipeline = parallel.fsdp, parallel.data, parallel.tensor, parallel.pipeline
    if parallel == ParallelSection() and cluster.gpus > 1:
        advice = f"nothing shares the work of {cluster.gpus} GPUs: add fsdp: {{degree: {cluster.gpus}}}, or use one GPU"
        document.problem(("parallel",), advice, show=False)
        return None
    dimensions = [] if pipeline is None else [("pp", pipeline.degree)]
    if (sharded := fsdp or parallel.fsdp1) is not None:
        dimensions += [("replicate", sharded.replicas)] if sharded.replicas > 1 else []
        dimensions.append(("fsdp", sharded.degree))
    if (replicated := parallel.ddp or parallel.zero) is not None:
        dimensions.append(("dp", replicated.degree))
    if data is not None and (data.degree > 1 or tensor is None):
        dimensions.append(("dp", data.degree))
    if parallel.context is not None:
        dimensions.append(("cp", parallel.context.degree))
    if tensor is not None:
        dimensions.append(("tp", tensor.degree))
    try:
        mesh = Mesh(tuple(dimensions), cluster.gpus_per_node, cluster.gpus)
    except MeshError as error:
        document.problem(("parallel",), str(error), show=False)
        return None
    if fsdp is not None or parallel.zero is not None or not (parallel.expert or parallel.context or data or tensor):
        return mesh
    experts = expert_mesh(document, parallel.expert, mesh, tensor.degree if tensor is not None else 1)
    return None if experts is None else replace(mesh, experts=experts)
