"""What does it run on? GPUs and clusters (`catalogue`), ranks on them (`mesh`)."""

from sim.hardware.catalogue import (
    Cluster,
    Gpu,
    Node,
    Source,
    UnknownGpu,
    find_gpu,
    gpu_aliases,
    gpu_names,
    make_cluster,
)
from sim.hardware.mesh import Mesh, MeshError, Span

__all__ = [
    "Cluster",
    "Gpu",
    "Mesh",
    "MeshError",
    "Node",
    "Source",
    "Span",
    "UnknownGpu",
    "find_gpu",
    "gpu_aliases",
    "gpu_names",
    "make_cluster",
]
