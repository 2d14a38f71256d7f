"""Operators of routers: the best of a row, picking and placing by index, sorting tokens by expert as aten writes it.

Saved tensors are those that torch 2.13 keeps (tests/exact/recordings/experts); buffers of backward are read in its source.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import broadcast
from sim.runtime.strides import expand
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class TopK(Op):
    """Values and indices of the k largest of each row; saves the indices. Backward: zeros, values scattered in."""

    node = "TopkBackward0"
    aten = "aten.topk"
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:-1], k)
        values = tape.pointwise("aten::topk", shape, x.dtype, None, x.bytes, "sort")
        return values, tape.empty(shape, "int64")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_placed(tape, first(gradients), node.metas[0][0], saved[0])]


def _placed(tape: Tape, gradient: Tensor, shape: tuple[int, ...], indices: Tensor) -> Tensor:
    """zeros(shape) with the gradient scattered in."""
    out = tape.pointwise("aten::zeros", shape, gradient.dtype, None, 0, "fill")
    tape.recorder.memory_bound("aten::scatter_", "elementwise", 2 * gradient.bytes + indices.bytes)
    return out


class Sigmoid(Op):
    """Saves its result."""

    node = "SigmoidBackward0"
    aten = "aten.sigmoid"
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.pointwise("aten::sigmoid", x.shape, x.dtype, None, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [tape.pointwise("aten::sigmoid_backward", gradient.shape, gradient.dtype, None, 2 * gradient.bytes)]


class Gather(Op):
    """x.gather(-1, indices): saves x and the indices. Backward: zeros, values added in."""

    node = "GatherBackward0"
    aten = "aten.gather"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, indices: Tensor) -> Iterable[Tensor | None]:
        return (indices, x)

    @staticmethod
    def forward(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
        return tape.pointwise("aten::gather", indices.shape, x.dtype, None, indices.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_placed(tape, first(gradients), node.metas[0][0], saved[0]), None]


class Scatter(Op):
    """zeros [T, E].scatter(1, indices, x [T, k]): saves the indices. Backward: gather."""

    node = "ScatterBackward0"
    aten = "aten.scatter"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, indices: Tensor) -> Iterable[Tensor | None]:
        return (indices,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, indices: Tensor, width: int) -> Tensor:
        shape = (*x.shape[:-1], width)
        zeros = tape.pointwise("aten::zeros_like", shape, x.dtype, None, 0, "fill")
        out = tape.pointwise("aten::scatter", shape, x.dtype, None, zeros.bytes + x.bytes + indices.bytes)
        del zeros
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [tape.pointwise("aten::gather", node.metas[0][0], gradient.dtype, None, saved[0].bytes), None]


class SumOver(Op):
    """x.sum(dim): nothing saved; backward a view that repeats the gradient."""

    node = "SumBackward1"
    aten = "aten.sum"

    @staticmethod
    def forward(tape: Tape, x: Tensor, dim: int, keepdim: bool) -> Tensor:
        shape = list(x.shape)
        shape[dim : dim + 1] = [1] if keepdim else []
        return tape.pointwise("aten::sum", tuple(shape), x.dtype, None, x.bytes, "reduce")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, shape = first(gradients), node.metas[0][0]
        dim = node.attributes[0]
        ones = (*shape[:dim], 1, *shape[dim + 1 :])
        return [gradient.alias(shape, expand(ones, None, shape))]


class Divide(Op):
    """a / b by broadcasting: saves both."""

    node = "DivBackward0"
    aten = "aten.div"

    @staticmethod
    def saved_inputs(node: Node, a: Tensor, b: Tensor) -> Iterable[Tensor | None]:
        return (b, a if b.requires_grad else None)

    @staticmethod
    def forward(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
        return tape.pointwise("aten::div", broadcast(a.shape, b.shape), a.dtype, None, a.bytes + b.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return division_gradients(tape, node, first(gradients))


def division_gradients(tape: Tape, node: Node, gradient: Tensor) -> Gradients:
    """Of b first: -gradient times a / b / b; then of a: gradient / b."""
    shape, dtype = gradient.shape, gradient.dtype
    result: Gradients = [None, None]
    if node.needs(1):
        ratio = tape.pointwise("aten::div", shape, dtype, None, 2 * gradient.bytes)
        again = tape.pointwise("aten::div", shape, dtype, None, 2 * gradient.bytes)
        negative = tape.pointwise("aten::neg", shape, dtype, None, gradient.bytes)
        result[1] = tape.pointwise("aten::mul", shape, dtype, None, 2 * gradient.bytes)
        del negative, again, ratio
    if node.needs(0):
        result[0] = tape.pointwise("aten::div", shape, dtype, None, 2 * gradient.bytes)
    return result


class MaskedFill(Op):
    """x.masked_fill(mask, value): saves the mask."""

    node = "MaskedFillBackward0"
    aten = "aten.masked_fill"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, mask: Tensor) -> Iterable[Tensor | None]:
        return (mask,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
        return tape.pointwise("aten::masked_fill", x.shape, x.dtype, None, x.bytes + mask.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [tape.pointwise("aten::masked_fill", gradient.shape, gradient.dtype, None, gradient.bytes), None]


class MaskedSelect(Op):
    """x.masked_select(mask), `count` entries: saves x and the mask. Backward: zeros, entries put in."""

    node = "MaskedSelectBackward0"
    aten = "aten.masked_select"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, mask: Tensor) -> Iterable[Tensor | None]:
        return (mask, x)

    @staticmethod
    def forward(tape: Tape, x: Tensor, mask: Tensor, count: int) -> Tensor:
        return tape.pointwise("aten::masked_select", (count,), x.dtype, None, x.bytes + mask.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_placed(tape, first(gradients), node.metas[0][0], saved[0]), None]


class IndexSelect(Op):
    """Rows of x [T, H] by indices [N]: saves the indices. Backward: zeros [T, H], rows added in."""

    node = "IndexSelectBackward0"
    aten = "aten.index_select"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, indices: Tensor) -> Iterable[Tensor | None]:
        return (indices,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
        shape = (indices.elements, *x.shape[1:])
        moved = prod(shape) * x.bytes // x.elements + indices.bytes
        return tape.pointwise("aten::index_select", shape, x.dtype, None, moved, "copy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        out = tape.pointwise("aten::zeros", node.metas[0][0], gradient.dtype, None, 0, "fill")
        tape.recorder.memory_bound("aten::index_add_", "copy", 2 * gradient.bytes + saved[0].bytes)
        return [out, None]


class ScatterAdd(Op):
    """zeros [T, H].scatter_add_(0, indices [N] expanded, x [N, H]): saves the indices. Backward: gather."""

    node = "ScatterAddBackward0"
    aten = "aten.scatter_add_"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, indices: Tensor) -> Iterable[Tensor | None]:
        return (indices,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, indices: Tensor, rows: int) -> Tensor:
        out = tape.pointwise("aten::zeros", (rows, *x.shape[1:]), x.dtype, None, 0, "fill")
        tape.recorder.memory_bound("aten::scatter_add_", "copy", 2 * x.bytes + indices.bytes)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        shape, dtype = node.metas[0]
        moved = prod(shape) * first(gradients).bytes // first(gradients).elements
        return [tape.pointwise("aten::gather", shape, dtype, None, moved, "copy"), None]


@rule("top_k")
def top_k(tape: Tape, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = tape.apply_tuple(TopK, (x,), k)
    return values, indices


@rule("sigmoid")
def sigmoid(tape: Tape, x: Tensor) -> Tensor:
    return tape.apply(Sigmoid, (x,))


@rule("gather")
def gather(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
    return tape.apply(Gather, (x, indices))


@rule("scatter")
def scatter(tape: Tape, x: Tensor, indices: Tensor, width: int) -> Tensor:
    return tape.apply(Scatter, (x, indices), width)


@rule("sum_over")
def sum_over(tape: Tape, x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return tape.apply(SumOver, (x,), dim % len(x.shape), keepdim)


@rule("divide")
def divide(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    return tape.apply(Divide, (a, b))


@rule("masked_fill")
def masked_fill(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
    return tape.apply(MaskedFill, (x, mask))


@rule("masked_select")
def masked_select(tape: Tape, x: Tensor, mask: Tensor, count: int) -> Tensor:
    return tape.apply(MaskedSelect, (x, mask), count)


@rule("index_select")
def index_select(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
    return tape.apply(IndexSelect, (x, indices))


@rule("scatter_add")
def scatter_add(tape: Tape, x: Tensor, indices: Tensor, rows: int) -> Tensor:
    return tape.apply(ScatterAdd, (x, indices), rows)
