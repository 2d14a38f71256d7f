"""Experts in plain PyTorch: rows sorted and picked by index, products of several experts over one sorted input.

Recorded with torch 2.14 (tests/exact/recordings/implementations); sizes of temporary storage are a fit to 13 lengths.
Letters: N copies of tokens in the order of their experts, E experts, K inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.model.experts import Groups
from sim.program.kernels import Gemm
from sim.program.program import Owner
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.routing import division_gradients
from sim.runtime.ops.views import Transpose
from sim.runtime.strides import Strides
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

SORTED_AT_ONCE = 4096  # entries that torch.sort takes in one block
PLACED_AT_ONCE = 2304  # rows that index_put_ sorts in one block
ALL_BITS = 1 << 62
BYTES_PER_EXPERT, BYTES_PER_SM = 60, 512  # _grouped_mm: pointers and sizes of each product, workspace


class DivideInPlace(Op):
    """x /= other by broadcasting: keeps other and a copy of what x was."""

    node = "DivBackward0"
    aten = "aten.div_"
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, other: Tensor) -> Iterable[Tensor | None]:
        return (other,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        before = tape.copy(x)
        tape.recorder.memory_bound("aten::div_", "elementwise", 2 * x.bytes + other.bytes)
        return x.detach(), before

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return division_gradients(tape, node, first(gradients))


class IndexRows(Op):
    """x[indices]: keeps the indices. Backward: zeros, then index_put_ with its sort of the indices."""

    node = "IndexBackward0"
    aten = "aten.index"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, indices: Tensor) -> Iterable[Tensor | None]:
        return (indices,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
        shape = (indices.elements, *x.shape[1:])
        moved = indices.elements * x.bytes // x.shape[0] + indices.bytes
        return tape.pointwise("aten::index", shape, x.dtype, None, moved, "copy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, shape = first(gradients), node.metas[0][0]
        out = tape.pointwise("aten::zeros", shape, gradient.dtype, None, 0, "fill")
        _sort_for_placing(tape, saved[0].elements, shape[0])
        tape.recorder.memory_bound("aten::_index_put_impl_", "copy", 2 * gradient.bytes)
        return [out, None]


def _sort_for_placing(tape: Tape, count: int, rows: int) -> None:
    """Linear indices of `count` entries below `rows`, sorted with their places."""

    def buffer(elements: int, dtype: str = "int64") -> Tensor:
        return tape.empty((elements,), dtype, owner=Owner.WORKSPACE)

    wrapped = buffer(count)
    linear = buffer(count)
    del wrapped
    places, sorted_places = buffer(count), buffer(count)
    sorted_indices = buffer(count)
    temporary = buffer(1 if count <= PLACED_AT_ONCE else scratch.cub_radix_sort(count, rows), "uint8")
    tape.recorder.memory_bound("cub::DeviceRadixSort", "sort", 8 * count * 8)
    del temporary, sorted_indices, sorted_places, places, linear


class GroupedMm(Op):
    """x [N, K] times each expert's w_t [E, K, M], the rows of one expert after those of another. Keeps w_t, x, offsets.

    Backward: of the weights, in the order of w_t in memory, then of x.
    """

    node = "GroupedMmBackward0"
    aten = "aten._grouped_mm"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, w_t: Tensor, offsets: Tensor) -> Iterable[Tensor | None]:
        return (w_t if x.requires_grad else None, offsets, x if w_t.requires_grad else None)

    @staticmethod
    def forward(tape: Tape, x: Tensor, w_t: Tensor, offsets: Tensor, groups: Groups, strides: Strides) -> Tensor:
        experts, k, m = w_t.shape
        out = tape.empty((x.shape[0], m), x.dtype)
        _products(tape, [Gemm(rows, m, k, x.dtype, count, grouped=True) for count, rows in groups], experts)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, (x_shape, _), (w_shape, _) = first(gradients), *node.metas[:2]
        groups, strides = node.attributes
        (experts, k, m), dtype = w_shape, gradient.dtype
        result: Gradients = [None, None, None]
        if node.needs(1):
            result[1] = tape.empty(w_shape, dtype, strides)
            _products(tape, [Gemm(k, m, rows, dtype, count, grouped=True) for count, rows in groups], experts)
        if node.needs(0):
            result[0] = tape.empty(x_shape, dtype)
            _products(tape, [Gemm(rows, k, m, dtype, count, grouped=True) for count, rows in groups], experts)
        return result


def _products(tape: Tape, works: list[Gemm], experts: int) -> None:
    tape.scratch(BYTES_PER_EXPERT * experts, BYTES_PER_SM * tape.device.sms)
    for work in works:
        if work.flops:
            tape.recorder.launch("aten::_grouped_mm", work)


@rule("divide_in_place")
def divide_in_place(tape: Tape, x: Tensor, other: Tensor) -> Tensor:
    return tape.apply_tuple(DivideInPlace, (x, other))[0]


@rule("index_rows")
def index_rows(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
    return tape.apply(IndexRows, (x, indices))


@rule("grouped_mm")
def grouped_mm(tape: Tape, x: Tensor, weight: Tensor, offsets: Tensor, groups: Groups) -> Tensor:
    """x times the weights [E, M, K], seen transposed."""
    w_t = tape.apply(Transpose, (weight,), 1, 2)
    return tape.apply(GroupedMm, (x, w_t, offsets), groups, w_t.strides)


@rule("sort")
def sort(tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """torch.sort of whole numbers [N]: values and places, and what the sort needs meanwhile."""
    values, places = tape.empty(x.shape, "int64"), tape.empty(x.shape, "int64")
    more = scratch.cub_radix_sort(x.elements, ALL_BITS) if x.elements > SORTED_AT_ONCE else 0
    tape.scratch(8 * x.elements, more)
    tape.recorder.memory_bound("aten::sort", "sort", 8 * x.bytes)
    return values, places
