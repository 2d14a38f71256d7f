"""Which ranks meet in a collective, and how they lie on the nodes."""

from __future__ import annotations

from sim.hardware.mesh import Mesh, Span
from sim.program.kernels import Collective

REDUCED_OVER_CONTEXT = ("dp", "fsdp")
"""Groups that context-parallel ranks belong to as well."""
DIMENSIONS = {"ep_etp": ("ep", "etp")}
"""Groups that go along several dimensions."""


def placement(mesh: Mesh, collective: Collective) -> Span:
    """How a collective's ranks lie on the nodes. A post-forward group is the nearest `size` ranks of the shard group; of
    the replicas "dp:shard" are `size` neighbours, "dp:across" one of each such group."""
    size, (name, _, part) = collective.size, collective.group.partition(":")
    if name == "fsdp_post_forward":
        per_node = min(size, mesh.gpus_per_node)
        return Span(size, -(-size // per_node), per_node)
    if name == "embedding":
        same_node = mesh.rank({"pp": mesh.degree("pp") - 1}) < mesh.gpus_per_node
        return Span(2, 1, 2) if same_node else Span(2, 2, 1)
    names = DIMENSIONS.get(name, (name, "cp") if name in REDUCED_OVER_CONTEXT else (name,))
    wide = tuple(dimension for dimension in names if mesh.degree(dimension) > 1) or names[:1]
    if not part:
        return mesh.span(*wide)
    members = mesh.members(*wide)
    return mesh.span_of(members[:size] if part == "shard" else members[:: len(members) // size])
