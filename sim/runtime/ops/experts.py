"""Megatron's expert layers: logits of the router, tokens sorted by expert, products of several experts, their exchange.

Source: megatron-core 0.16.1, transformer/moe and fusions/fused_bias_swiglu.py; Transformer Engine, _GroupedLinear and
_moe_permute_mask_map, read there; what is saved is recorded where Transformer Engine is not involved.
Letters: T tokens of a rank, E experts, N tokens at this rank's experts, H hidden, F width inside an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sim.model.experts import Groups, rows_of
from sim.program.kernels import Collective, CollectiveKind, Gemm
from sim.program.program import COMPUTE
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import to
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

PASS_TOKENS = 1024
"""Tokens of a block while rows are numbered."""


class RouterLogits(Op):
    """RouterGatingLinearFunction: logits [S, B, E] in the router's dtype by one product; saves x and weight.

    Backward casts weight and x, and both results back.
    """

    node = "RouterGatingLinearFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor) -> Iterable[Tensor | None]:
        return (x, weight)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor, dtype: str) -> Tensor:
        (experts, hidden), tokens = weight.shape, prod(x.shape[:-1])
        out = tape.empty((*x.shape[:-1], experts), dtype)
        tape.recorder.gemm("router_gemm", tokens, experts, hidden, x.dtype)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        x, weight = saved
        (dtype,) = node.attributes
        (experts, hidden), tokens = weight.shape, prod(x.shape[:-1])
        wide = to(tape, weight, dtype)
        dx = tape.matmul_out("aten::mm", tokens, hidden, experts, dtype)
        del wide
        wide = to(tape, x, dtype)
        dw = tape.matmul_out("aten::mm", experts, hidden, tokens, dtype, over_rows=True)
        del wide
        dx = tape.cast_copy(dx, x.dtype) if dtype != x.dtype else dx
        dw = tape.cast_copy(dw, weight.dtype) if dtype != weight.dtype else dw
        gradients.clear()
        return [dx.alias(x.shape), dw]


class GroupedLinear(Op):
    """_GroupedLinear: x [N, in] times each expert's weight [out, in], and its bias, which the product adds and sums in
    backward; saves x and the weights. dx, then the weights'.

    Experts of equal tokens are one batch of products here; the library starts one per expert on four streams.
    """

    node = "_GroupedLinearBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, *matrices: Tensor) -> Iterable[Tensor | None]:
        return (x, *(matrix for matrix in matrices if len(matrix.shape) == 2))

    @staticmethod
    def forward(tape: Tape, x: Tensor, *arguments: Any) -> Tensor:
        *matrices, groups = arguments
        n, k = matrices[0].shape
        out = tape.empty((x.shape[0], n), x.dtype)
        _products(tape, "grouped_gemm", groups, n, k, x.dtype)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        x, *weights = saved
        (groups,) = node.attributes
        (n, k), result = weights[0].shape, list[Tensor | None]()
        result.append(tape.empty(x.shape, x.dtype) if node.needs(0) else None)
        if node.needs(0):
            _products(tape, "grouped_gemm_dgrad", groups, k, n, x.dtype)
        fused = tape.main_gradients is not None and tape.main_gradients.takes(weights[0])
        trained = [node.needs(1 + number) for number in range(len(weights))]
        result += [tape.empty((n, k), x.dtype) if needs and not fused else None for needs in trained]
        if any(trained):
            for count, rows in groups:
                if rows:
                    work = Gemm(n, k, rows, x.dtype, count, accumulate=fused, grouped=True)
                    tape.recorder.launch("grouped_gemm_wgrad", work)
        gradients.clear()
        return result + bias_gradients(tape, node, 1 + len(weights), n, x.dtype)


def bias_gradients(tape: Tape, node: Node, start: int, width: int, dtype: str) -> list[Tensor | None]:
    """Of the inputs from `start` on, each [out]: summed by kernels that read the output's gradient anyway."""
    return [tape.empty((width,), dtype) if node.needs(number) else None for number in range(start, len(node.edges))]


def _products(tape: Tape, name: str, groups: Groups, n: int, k: int, dtype: str) -> None:
    tape.stream_workspaces()
    for count, rows in groups:
        if rows:
            tape.recorder.launch(name, Gemm(rows, n, k, dtype, count, grouped=True))


class WeightedSwiGlu(Op):
    """WeightedSwiGLUFunction: silu(gate) * value * weight of [N, 2 F] and [N, 1], one kernel each way; saves both."""

    node = "WeightedSwiGLUFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weights: Tensor) -> Iterable[Tensor | None]:
        return (x, weights)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weights: Tensor) -> Tensor:
        return tape.pointwise("weighted_swiglu", (x.shape[0], x.shape[1] // 2), x.dtype, None, x.bytes + weights.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        x, weights = saved
        dx = tape.pointwise("weighted_swiglu_back", x.shape, x.dtype, None, x.bytes + first(gradients).bytes)
        dweights = tape.empty(weights.shape, weights.dtype)
        gradients.clear()
        return [dx, dweights]


class Permute(Op):
    """_moe_permute_mask_map: rows of x [T, H] copied for each of their experts, weights [T, E] picked; both [N, ...].

    Saves the map, int32 [T, 2 E + 1], which is the third result. Backward: one kernel.
    """

    node = "_moe_permute_mask_mapBackward"
    saves_late = True
    saved_outputs = (2,)
    not_differentiable = (2,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weights: Tensor, chosen: Tensor, rows: int) -> tuple[Tensor, ...]:
        tokens, experts = weights.shape
        places = tape.empty((tokens, 2 * experts + 1), "int32")
        workspace = tape.empty((experts, -(-tokens // PASS_TOKENS)), "int32")
        tape.recorder.memory_bound("row_id_map_pass_1", "elementwise", chosen.bytes + places.bytes)
        for name in ("row_id_map_pass_2", "row_id_map_pass_3"):
            tape.recorder.memory_bound(name, "elementwise", 2 * places.bytes)
        del workspace
        moved = rows * x.bytes // tokens + places.bytes
        out = tape.pointwise("permute_kernel", (rows, x.shape[1]), x.dtype, None, moved, "copy")
        return out, tape.empty((rows,), weights.dtype), places

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (shape, dtype), (weights_shape, weights_dtype) = node.metas[:2]
        moved = first(gradients).bytes + saved[0].bytes
        dx = tape.pointwise("unpermute_kernel", shape, dtype, None, moved, "copy")
        return [dx, tape.empty(weights_shape, weights_dtype), None]


class Unpermute(Op):
    """_moe_unpermute_mask_map: the sum of a token's rows, [T, H] of [N, H]; saves the map."""

    node = "_moe_unpermute_mask_mapBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, places: Tensor) -> Iterable[Tensor | None]:
        return (places,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, places: Tensor, tokens: int) -> Tensor:
        shape = (tokens, x.shape[1])
        return tape.pointwise("unpermute_kernel", shape, x.dtype, None, x.bytes + places.bytes, "copy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        shape, dtype = node.metas[0]
        moved = prod(shape) * first(gradients).bytes // first(gradients).elements + saved[0].bytes
        return [tape.pointwise("permute_kernel", shape, dtype, None, moved, "copy"), None]


class SortChunks(Op):
    """Rows of x [N, ...] in another order of equal or unequal chunks: fused by a map, int32 [N], that is saved, else cut
    and joined again. Backward: the way back."""

    node = "_moe_chunk_sortBackward"
    saves_late = True
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        places = tape.empty((x.shape[0] if fused else 0,), "int32")
        tape.recorder.memory_bound("make_chunk_sort_map", "elementwise", places.bytes)
        return tape.copy(x), places

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [tape.copy(first(gradients))]


class AllToAll(Op):
    """_AllToAll: rows of x go to the ranks of their experts, [rows, ...] come back; the reverse in backward. Blocks."""

    node = "_AllToAllBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, rows: int, ranks: int) -> Tensor:
        return _exchanged(tape, x, (rows, *x.shape[1:]), ranks)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_exchanged(tape, first(gradients), node.metas[0][0], node.attributes[1])]


def _exchanged(tape: Tape, x: Tensor, shape: tuple[int, ...], ranks: int) -> Tensor:
    """The larger of what is sent and received decides the time."""
    out = tape.empty(shape, x.dtype)
    tape.recorder.collective(Collective("all_to_all", max(x.bytes, out.bytes), "ep", ranks, x.dtype), COMPUTE)
    return out


class GatherRows(Op):
    """_GatherFromSequenceParallelRegion over `group`: all ranks' rows, in a new buffer or the global one; backward sums
    and scatters, into the same."""

    node = "_GatherFromSequenceParallelRegionBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int, group: str, buffered: bool) -> Tensor:
        return _collected(tape, "all_gather", x, (x.shape[0] * ranks, *x.shape[1:]), ranks, group, buffered)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_collected(tape, "reduce_scatter", first(gradients), node.metas[0][0], *node.attributes)]


class ScatterRows(Op):
    """_ReduceScatterToSequenceParallelRegion over `group`: this rank's rows of the sum; backward gathers."""

    node = "_ReduceScatterToSequenceParallelRegionBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int, group: str) -> Tensor:
        return _collected(tape, "reduce_scatter", x, (x.shape[0] // ranks, *x.shape[1:]), ranks, group)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_collected(tape, "all_gather", first(gradients), node.metas[0][0], *node.attributes)]


def _collected(
    tape: Tape, kind: CollectiveKind, x: Tensor, shape: tuple[int, ...], ranks: int, group: str, buffered: bool = False
) -> Tensor:
    out = tape.global_buffer(prod(shape), x.dtype).alias(shape) if buffered else tape.empty(shape, x.dtype)
    tape.recorder.collective(Collective(kind, max(x.bytes, out.bytes), group, ranks, x.dtype), COMPUTE)
    return out


class WithAuxiliaryLoss(Op):
    """MoEAuxLossAutoScaler: x itself; saves the loss, whose gradient is a scale."""

    node = "MoEAuxLossAutoScalerBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, loss: Tensor) -> Iterable[Tensor | None]:
        return (loss,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, loss: Tensor) -> Tensor:
        return x.alias(x.shape, x.strides)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        ones = tape.pointwise("aten::ones_like", (), saved[0].dtype, None, 0, "fill")
        return [first(gradients), tape.pointwise("aten::mul", (), ones.dtype, None, ones.bytes)]


@rule("router_logits")
def router_logits(tape: Tape, x: Tensor, weight: Tensor, dtype: str | None) -> Tensor:
    return tape.apply(RouterLogits, (x, weight), dtype or x.dtype)


@rule("grouped_linear")
def grouped_linear(
    tape: Tape, x: Tensor, weights: tuple[Tensor, ...], groups: Groups, biases: tuple[Tensor, ...]
) -> Tensor:
    assert rows_of(groups) == x.shape[0]
    return tape.apply(GroupedLinear, (x, *weights, *biases), groups)


@rule("weighted_swiglu")
def weighted_swiglu(tape: Tape, x: Tensor, weights: Tensor) -> Tensor:
    return tape.apply(WeightedSwiGlu, (x, weights))


@rule("permute")
def permute(tape: Tape, x: Tensor, weights: Tensor, chosen: Tensor, rows: int) -> tuple[Tensor, ...]:
    return tape.apply_tuple(Permute, (x, weights, chosen), rows)


@rule("unpermute")
def unpermute(tape: Tape, x: Tensor, places: Tensor, tokens: int) -> Tensor:
    return tape.apply(Unpermute, (x, places), tokens)


@rule("sort_chunks")
def sort_chunks(tape: Tape, x: Tensor, fused: bool) -> Tensor:
    return tape.apply_tuple(SortChunks, (x,), fused)[0]


@rule("all_to_all")
def all_to_all(tape: Tape, x: Tensor, rows: int, ranks: int) -> Tensor:
    return x if ranks == 1 else tape.apply(AllToAll, (x,), rows, ranks)


@rule("gather_rows")
def gather_rows(tape: Tape, x: Tensor, ranks: int, group: str, buffered: bool) -> Tensor:
    return tape.apply(GatherRows, (x,), ranks, group, buffered)


@rule("scatter_rows")
def scatter_rows(tape: Tape, x: Tensor, ranks: int, group: str) -> Tensor:
    return tape.apply(ScatterRows, (x,), ranks, group)


@rule("with_auxiliary_loss")
def with_auxiliary_loss(tape: Tape, x: Tensor, loss: Tensor) -> Tensor:
    return tape.apply(WithAuxiliaryLoss, (x, loss))
