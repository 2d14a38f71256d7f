"""Where the ranks of a tensor-parallel group meet: Megatron's mappings, vocabulary shards, and overlapped collectives.

A mapping's collective blocks: it stands on the compute stream (NCCL's stream waits for compute, which waits for NCCL).
Backward of a column-parallel product overlaps with products on a stream of its own (`start`, `finish`).
Source: megatron-core 0.16.1, tensor_parallel/mappings.py, layers.py, cross_entropy.py, read there; no recording.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.model.calls import Shape
from sim.program.kernels import Collective, CollectiveKind
from sim.program.program import COMPUTE, TENSOR
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.embedding import embedding
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

GROUP = "tp"


def block(tape: Tape, kind: CollectiveKind, whole: Tensor, ranks: int) -> None:
    """A collective over the group that compute waits for; `whole` is the full buffer."""
    tape.recorder.collective(Collective(kind, whole.bytes, GROUP, ranks, whole.dtype), COMPUTE)


def start(tape: Tape, kind: CollectiveKind, whole: Tensor, ranks: int) -> int:
    """An asynchronous collective behind what compute was given so far; returns its handle's event."""
    recorder = tape.recorder
    recorder.stream_waits_stream(TENSOR, COMPUTE)
    recorder.collective(Collective(kind, whole.bytes, GROUP, ranks, whole.dtype), TENSOR)
    return recorder.record(TENSOR)


def finish(tape: Tape, event: int) -> None:
    """handle.wait(): compute waits, the host goes on."""
    tape.recorder.wait(COMPUTE, event)


def whole_tokens(shape: Shape, ranks: int) -> Shape:
    """[S, ...] of [S/ranks, ...]."""
    return (shape[0] * ranks, *shape[1:])


def some_tokens(shape: Shape, ranks: int) -> Shape:
    """[S/ranks, ...] of [S, ...]."""
    return (shape[0] // ranks, *shape[1:])


class AllReduce(Op):
    """_ReduceFromModelParallelRegion: in place forward, nothing backward."""

    node = "_ReduceFromModelParallelRegionBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int) -> Tensor:
        block(tape, "all_reduce", x, ranks)
        return x.detach()

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [gradients[0]]


def _gather(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    out = tape.empty(whole_tokens(x.shape, ranks), x.dtype)
    block(tape, "all_gather", out, ranks)
    return out


class ReduceScatterTokens(Op):
    """_ReduceScatterToSequenceParallelRegion: a new buffer of S/ranks tokens; backward gathers into a new one of S."""

    node = "_ReduceScatterToSequenceParallelRegionBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int) -> Tensor:
        out = tape.empty(some_tokens(x.shape, ranks), x.dtype)
        block(tape, "reduce_scatter", x, ranks)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_gather(tape, first(gradients), node.attributes[0])]


class ScatterTokens(Op):
    """_ScatterToSequenceParallelRegion: the rank's tokens, a view; backward gathers."""

    node = "_ScatterToSequenceParallelRegionBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int) -> Tensor:
        return x.alias(some_tokens(x.shape, ranks))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_gather(tape, first(gradients), node.attributes[0])]


class GatherWidths(Op):
    """_GatherFromModelParallelRegion: gathered one behind another, then copied side by side; backward copies its part."""

    node = "_GatherFromModelParallelRegionBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int) -> Tensor:
        behind = _gather(tape, x, ranks)
        return tape.pointwise("aten::cat", (*x.shape[:-1], x.shape[-1] * ranks), x.dtype, None, behind.bytes, "copy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        shape, dtype = node.metas[0]
        return [tape.pointwise("aten::copy_", shape, dtype, None, first(gradients).bytes // node.attributes[0], "copy")]


class ZeroRows(Op):
    """x[mask, :] = 0 in place; backward clears the same rows of a copy of the gradient. Saves the mask."""

    node = "IndexPutBackward0"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, mask: Tensor) -> Iterable[Tensor | None]:
        return (mask,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
        tape.recorder.memory_bound("aten::masked_fill_", "elementwise", 2 * x.bytes + mask.bytes)
        return x.detach()

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        copy = tape.copy(first(gradients))
        tape.recorder.memory_bound("aten::masked_fill_", "elementwise", 2 * copy.bytes + saved[0].bytes)
        return [copy, None]


def outside_shard(tape: Tape, indices: Tensor) -> Tensor:
    """(indices < first) | (indices >= last), a mask."""
    below = tape.pointwise("aten::lt", indices.shape, "bool", None, indices.bytes)
    above = tape.pointwise("aten::ge", indices.shape, "bool", None, indices.bytes)
    return tape.pointwise("aten::bitwise_or", indices.shape, "bool", None, below.bytes + above.bytes)


@rule("all_reduce")
def all_reduce(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    return tape.apply(AllReduce, (x,), ranks)


@rule("reduce_scatter_tokens")
def reduce_scatter_tokens(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    return tape.apply(ReduceScatterTokens, (x,), ranks)


@rule("gather_widths")
def gather_widths(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    return tape.apply(GatherWidths, (x,), ranks)


@rule("scatter_tokens")
def scatter_tokens(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    return tape.apply(ScatterTokens, (x,), ranks)


@rule("embedding_of_shard")
def embedding_of_shard(tape: Tape, indices: Tensor, weight: Tensor) -> Tensor:
    """VocabParallelEmbedding.forward up to its all-reduce: indices outside the shard look up row 0, cleared after."""
    mask = outside_shard(tape, indices)
    clone = tape.copy(indices)
    inside = tape.pointwise("aten::sub", indices.shape, "int64", None, clone.bytes)
    del clone
    tape.recorder.memory_bound("aten::masked_fill_", "elementwise", 2 * inside.bytes + mask.bytes)
    rows = embedding(tape, inside, weight)
    return tape.apply(ZeroRows, (rows, mask))
