"""Time of a collective: two protocols inside a node, a hierarchical ring across nodes, point to point (sends
between stages; a ring exchange, where every rank sends and receives at once, and the slowest link sets the pace).

Inside a node: t = min over protocols of a + w / B, with a low-latency and a bandwidth protocol (a_L, B_L; a_S, B_S);
w is what one rank puts on the wire of a buffer of S bytes over n ranks:

    all_gather, reduce_scatter, all_to_all  S (n-1)/n      all_reduce  2 S (n-1)/n      broadcast  S

Source: COSTS.md 5, fitted to nccl-tests rows of ai-dynamo/aiconfigurator. Across N nodes with r ranks each: every rank
exchanges its 1/r of the buffer with its peers in the other nodes over its own NIC, while the node's ranks exchange
over NVLink; both proceed together, so the slower sets the rate, and every ring step adds the latency of one hop, also
those inside nodes, all of which NCCL's ring passes one after the other (a holds those of one node):

    t = a + steps * (hop + (r-1) node_hop) + max(w_node / B, w_nic / B_nic),   w_nic = S/r (N-1)/N (twice for all_reduce)

Raw logs of 8-GPU nodes by size were not found (COSTS.md 5): the hierarchical form is assumed. Latencies as NCCL itself
adds them (NVIDIA/nccl, src/graph/tuning.cc: (steps - inter-node steps) * intra + inter-node steps * inter).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Protocol

from sim.cost.figures import CostError, Figures, unknown
from sim.cost.gpu import Gpu, fabric_bytes_per_s
from sim.program.kernels import Collective

PROTOCOLS = ("low_latency", "bandwidth")
Parts = tuple[tuple[str, float | int | str], ...]


class Placement(Protocol):
    """How a group lies on the machines (`sim.hardware.mesh.Span`): `size` ranks on `nodes` nodes."""

    @property
    def size(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def ranks_per_node(self) -> int:
        """Of the node that holds most."""
        ...


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A latency, then a flow of `bytes` per rank at most `cap_bytes_per_s`; their sum is the time alone.

    `bytes` is what crosses the rank's slowest kind of link: its NIC where the group spans nodes, else its NVLink.
    `parts` explains the choice: protocol, wire bytes, and for several nodes what NVLink and NIC each ask.
    """

    latency_ns: int
    bytes: int
    cap_bytes_per_s: float
    parts: Parts = ()

    @property
    def alone_ns(self) -> float:
        return self.latency_ns + (self.bytes / self.cap_bytes_per_s * 1e9 if self.bytes else 0.0)

    def lasting(self, ns: int, link_bytes_per_s: float) -> CollectiveCost:
        """The same collective, of which it was measured that it takes `ns` alone on a link of that bandwidth."""
        latency_ns = min(self.latency_ns, ns)
        if not self.bytes or latency_ns == ns:
            return CollectiveCost(ns, 0, self.cap_bytes_per_s, (*self.parts, ("measured_ns", ns)))
        cap = self.bytes / (ns - latency_ns) * 1e9
        on_link = min(1.0, link_bytes_per_s / cap)
        parts = (*self.parts, ("measured_ns", ns))
        return CollectiveCost(latency_ns, round(self.bytes * on_link), cap * on_link, parts)


def wire_bytes(kind: str, size_bytes: float, ranks: int) -> float:
    """Bytes that one of `ranks` sends for a buffer of `size_bytes` (the ring algorithm's minimum)."""
    if kind == "broadcast":
        return size_bytes if ranks > 1 else 0.0
    share = size_bytes * (ranks - 1) / ranks
    return 2 * share if kind == "all_reduce" else share


def nic_bytes(kind: str, size_bytes: float, placement: Placement) -> float:
    """Bytes that one rank sends to other nodes: its 1/r of the buffer; for all_to_all all that is meant for them."""
    share = size_bytes if kind == "all_to_all" else size_bytes / placement.ranks_per_node
    return wire_bytes(kind, share, placement.nodes)


def is_ring(kind: str, protocol: str) -> bool:
    """Does it pass all ranks one after the other? NCCL's low-latency all-reduce is a tree."""
    return kind != "all_to_all" and not (kind == "all_reduce" and protocol == "low_latency")


def ring_steps(kind: str, protocol: str, nodes: int) -> int:
    """Hops between nodes that follow one another."""
    if kind == "all_to_all":
        return 1
    if kind == "all_reduce":
        return 2 * (nodes - 1 if is_ring(kind, protocol) else ceil(log2(nodes)))
    return nodes - 1


@dataclass(frozen=True, slots=True)
class CollectiveForm:
    """Prices collectives and sends with one profile's figures. `fabric_bytes_per_s` joins the GPUs of a node,
    `network_bytes_per_s` is one GPU's line rate to other nodes; both per direction."""

    figures: Figures
    fabric_bytes_per_s: float
    network_bytes_per_s: float

    @classmethod
    def of(cls, figures: Figures, gpu: Gpu, network_bytes_per_s: float | None = None) -> CollectiveForm:
        """`network_bytes_per_s` None: the usual node's."""
        network = gpu.node.network_bytes_per_s if network_bytes_per_s is None else network_bytes_per_s
        return cls(figures, fabric_bytes_per_s(gpu), network)

    def cost(self, work: Collective, placement: Placement) -> CollectiveCost:
        """Cost of `work` over a group placed as said. Raises CostError if the placement does not hold its ranks."""
        if placement.size != work.size:
            raise CostError(f"a collective over {work.size} ranks of {work.group} on a placement of {placement.size}")
        if work.kind == "ring_exchange":
            return self.send(work.bytes, placement.nodes == 1)
        if work.size == 1:
            return CollectiveCost(0, 0, self.fabric_bytes_per_s)
        price = self._inside_node if placement.nodes == 1 else self._across_nodes
        return min((price(work, placement, protocol) for protocol in PROTOCOLS), key=lambda cost: cost.alone_ns)

    def send(self, size_bytes: int, same_node: bool) -> CollectiveCost:
        """Cost of a send and its recv, e.g. between pipeline stages."""
        if same_node:
            bandwidth = self.figures["p2p.node_gb_per_s"] * 1e9
        else:
            bandwidth = self.network_bytes_per_s * self.figures["p2p.nic_fraction"]
        latency_us = self.figures["p2p.node_latency_us" if same_node else "p2p.nic_latency_us"]
        return CollectiveCost(
            round(latency_us * 1e3), size_bytes, bandwidth, (("link", "node" if same_node else "nic"),)
        )

    def _inside_node(self, work: Collective, placement: Placement, protocol: str) -> CollectiveCost:
        latency_ns, bandwidth = self._protocol(work.kind, placement.ranks_per_node, protocol)
        wire = wire_bytes(work.kind, work.bytes, work.size)
        parts: Parts = (("protocol", protocol), ("wire_bytes", round(wire)), ("bus_bytes_per_s", bandwidth))
        # In-network reduction (NVLS) shows a bus bandwidth above the link's: fewer bytes cross it, in the same time.
        on_link = min(1.0, self.fabric_bytes_per_s / bandwidth)
        return CollectiveCost(round(latency_ns), round(wire * on_link), bandwidth * on_link, parts)

    def _across_nodes(self, work: Collective, placement: Placement, protocol: str) -> CollectiveCost:
        intra_latency_ns, intra_ns = 0.0, 0.0
        if placement.ranks_per_node > 1:
            intra_latency_ns, bandwidth = self._protocol(work.kind, placement.ranks_per_node, protocol)
            share = work.bytes / placement.nodes if work.kind == "all_to_all" else work.bytes
            intra_ns = wire_bytes(work.kind, share, placement.ranks_per_node) / bandwidth * 1e9
        sent = nic_bytes(work.kind, work.bytes, placement)
        nic = self.network_bytes_per_s * self.figures[f"inter_node.{protocol}.nic_fraction"]
        nic_ns = sent / nic * 1e9
        steps = ring_steps(work.kind, protocol, placement.nodes)
        node_steps = steps * (placement.ranks_per_node - 1) if is_ring(work.kind, protocol) else 0
        latency_ns = intra_latency_ns + steps * self.figures[f"inter_node.{protocol}.hop_us"] * 1e3
        latency_ns += node_steps * self.figures.get(f"inter_node.{protocol}.node_hop_us", 0.0) * 1e3
        cap = nic if nic_ns >= intra_ns else sent / intra_ns * 1e9
        parts: Parts = (
            ("protocol", protocol),
            ("hops", steps),
            ("node_hops", node_steps),
            ("node_ns", round(intra_ns)),
            ("nic_ns", round(nic_ns)),
            ("bound", "nic" if nic_ns >= intra_ns else "node"),
        )
        return CollectiveCost(round(latency_ns), round(sent), cap, parts)

    def _protocol(self, kind: str, ranks: int, protocol: str) -> tuple[float, float]:
        """Latency in ns and bandwidth in bytes/s for `ranks` of one node: of the next larger number measured."""
        root = collective_root(self.figures, kind, ranks)
        return self.figures[f"{root}.{protocol}_us"] * 1e3, self.figures[f"{root}.{protocol}_gb_per_s"] * 1e9


def collective_root(figures: Figures, kind: str, ranks: int) -> str:
    """Prefix of the figures for `ranks` of one node. Raises CostError for a kind without figures."""
    kinds = figures.under("collective")
    if kind not in kinds:
        raise CostError(unknown("collective", kind, kinds, where=figures.owner))
    root = f"collective.{kind}"
    sizes = sorted(int(part[1:]) for part in figures.under(root))
    return f"{root}.n{next((s for s in sizes if s >= ranks), sizes[-1])}"


def figure_names(figures: Figures, work: Collective, placement: Placement, cost: CollectiveCost) -> tuple[str, str]:
    """Names of the figures that decided the latency and the bandwidth of `cost`."""
    parts = dict(cost.parts)
    protocol, across = parts["protocol"], placement.nodes > 1
    inside = "" if placement.ranks_per_node == 1 else collective_root(figures, work.kind, placement.ranks_per_node)
    latency = f"inter_node.{protocol}.hop_us" if across else f"{inside}.{protocol}_us"
    if across and parts["bound"] == "nic":
        return latency, f"inter_node.{protocol}.nic_fraction"
    return latency, f"{inside}.{protocol}_gb_per_s"
