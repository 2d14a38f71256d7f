"""Mesh: which rank has which coordinate, and which links a group of ranks crosses.

Dimensions are ordered from the outermost (slowest) to the innermost, as torch's DeviceMesh numbers them: of
("pp", 2), ("fsdp", 4) rank 5 has the coordinate pp 1, fsdp 1. Ranks fill nodes in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class MeshError(ValueError):
    """The dimensions do not describe the GPUs."""


@dataclass(frozen=True, slots=True)
class Span:
    """How a group lies on the machines: `size` ranks on `nodes` nodes, at most `ranks_per_node` of them on one.

    nodes == 1: only links inside a node carry it.
    """

    size: int
    nodes: int
    ranks_per_node: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """`dimensions` are (name, degree), outermost first, names such as pp, replicate, fsdp, cp, tp. Raises MeshError.

    `experts`: the same ranks numbered for experts, whose groups cut across the others: pp, edp, ep, etp.
    """

    dimensions: tuple[tuple[str, int], ...]
    gpus_per_node: int
    gpus: int
    experts: Mesh | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dimensions]
        if len(set(names)) != len(names):
            raise MeshError(f"a dimension is named twice: {', '.join(names)}")
        if self.gpus < 1 or self.gpus_per_node < 1 or any(degree < 1 for _, degree in self.dimensions):
            raise MeshError("degrees and GPUs are counts of at least 1")
        if self.size != self.gpus:
            raise MeshError(f"{self.describe()}, but the cluster has {self.gpus} GPU{'s' * (self.gpus != 1)}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(degree for _, degree in self.dimensions)

    def describe(self) -> str:
        """The product as people write it: "fsdp 8 x tp 2 = 16 ranks"."""
        if not self.dimensions:
            return "one rank"
        product = " x ".join(f"{name} {degree}" for name, degree in self.dimensions)
        return f"{product} = {self.size} rank{'s' * (self.size != 1)}"

    def degree(self, name: str) -> int:
        """Degree of a dimension; 1 for a dimension that the mesh lacks."""
        return dict(self._view((name,)).dimensions).get(name, 1)

    def _view(self, names: tuple[str, ...]) -> Mesh:
        """The numbering that has these dimensions."""
        own = dict(self.dimensions)
        return self.experts if self.experts is not None and any(name not in own for name in names) else self

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` along every dimension. Raises IndexError outside 0..size-1."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of {self.size}")
        coordinate = {}
        for name, degree in reversed(self.dimensions):
            rank, coordinate[name] = divmod(rank, degree)
        return {name: coordinate[name] for name, _ in self.dimensions}

    def rank(self, coordinate: dict[str, int]) -> int:
        """The rank at a coordinate; dimensions that it leaves out count as 0."""
        rank = 0
        for name, degree in self.dimensions:
            rank = rank * degree + coordinate.get(name, 0)
        return rank

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """Ranks that `rank` meets along the named dimensions together, in order of rank (itself included)."""
        members = [self.coordinate(rank)]
        for name in names:
            members = [{**member, name: index} for member in members for index in range(self.degree(name))]
        return tuple(sorted(self.rank(member) for member in members))

    def span(self, *names: str, rank: int = 0) -> Span:
        """How the group of `rank` along the named dimensions lies on the nodes."""
        return self.span_of(self.members(*names, rank=rank))

    def members(self, *names: str, rank: int = 0) -> tuple[int, ...]:
        """The group of `rank` along the named dimensions, in the numbering that has them."""
        return self._view(names).group(rank, *names)

    def span_of(self, members: Sequence[int]) -> Span:
        """How these ranks lie on the nodes."""
        ranks_by_node = Counter(member // self.gpus_per_node for member in members)
        counts = ranks_by_node.values()
        return Span(sum(counts), len(ranks_by_node), max(counts))
