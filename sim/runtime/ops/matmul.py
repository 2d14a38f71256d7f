"""Matrix products. The gradient of the second matrix comes before that of the first, but addmm (alphabetical: mat1, mat2).

Sources: TAPE.md 1.4, 2.2, 2.7, section 3; TAPE_LLAMA_FSDP.md 0.1, 0.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import autocast_to
from sim.runtime.ops.views import T, UnsafeView, View, reshape, view
from sim.runtime.strides import Strides
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class Mm(Op):
    """x [m, k] times w_t [k, n]. Saves w_t, then x (argument names mat2, self). Backward: dW, then dx.

    dW has the strides of w_t, which are the attribute (mm_mat2_backward).
    """

    node = "MmBackward0"
    aten = "aten.mm"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, w_t: Tensor) -> Iterable[Tensor | None]:
        return (w_t if x.requires_grad else None, x if w_t.requires_grad else None)

    @staticmethod
    def forward(tape: Tape, x: Tensor, w_t: Tensor, strides: Strides) -> Tensor:
        (m, k), n = x.shape, w_t.shape[1]
        return tape.matmul_out("aten::mm", m, n, k, x.dtype)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        (m, k), n = node.metas[0][0], node.metas[1][0][1]
        result: Gradients = [None, None]
        if node.needs(1):
            result[1] = _weight_gradient(tape, node, k, n, m, gradient.dtype)
        if node.needs(0):
            result[0] = tape.matmul_out("aten::mm", m, k, n, gradient.dtype)
        return result


class Addmm(Op):
    """bias [n] + x [m, k] w_t [k, n]. Backward: dx, dW; the bias gradient is summed by the engine afterwards."""

    node = "AddmmBackward0"
    aten = "aten.addmm"

    @staticmethod
    def saved_inputs(node: Node, bias: Tensor, x: Tensor, w_t: Tensor) -> Iterable[Tensor | None]:
        return (x if w_t.requires_grad else None, w_t if x.requires_grad else None)

    @staticmethod
    def forward(tape: Tape, bias: Tensor, x: Tensor, w_t: Tensor, strides: Strides) -> Tensor:
        (m, k), n = x.shape, w_t.shape[1]
        return tape.matmul_out("aten::addmm", m, n, k, x.dtype)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        (m, k), n = node.metas[1][0], node.metas[2][0][1]
        result: Gradients = [gradient if node.needs(0) else None, None, None]
        if node.needs(1):
            result[1] = tape.matmul_out("aten::mm", m, k, n, gradient.dtype)
        if node.needs(2):
            result[2] = _weight_gradient(tape, node, k, n, m, gradient.dtype)
        return result


def _weight_gradient(tape: Tape, node: Node, k: int, n: int, rows: int, dtype: str) -> Tensor:
    out = tape.matmul_out("aten::mm", k, n, rows, dtype, over_rows=True)
    (out.strides,) = node.attributes
    return out


class Bmm(Op):
    """a [b, m, k] times b [b, k, n]; saves both (mat2, self). Backward: mat2 before self."""

    node = "BmmBackward0"
    aten = "aten.bmm"

    @staticmethod
    def saved_inputs(node: Node, a: Tensor, b: Tensor) -> Iterable[Tensor | None]:
        return (b if a.requires_grad else None, a if b.requires_grad else None)

    @staticmethod
    def forward(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
        (batch, m, k), n = a.shape, b.shape[2]
        return tape.matmul_out("aten::bmm", m, n, k, a.dtype, batch)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (batch, m, k), n = node.metas[0][0], node.metas[1][0][2]
        dtype = first(gradients).dtype
        result: Gradients = [None, None]
        if node.needs(1):
            result[1] = tape.matmul_out("aten::bmm", k, n, m, dtype, batch)
        if node.needs(0):
            result[0] = tape.matmul_out("aten::bmm", m, k, n, dtype, batch)
        return result


class Baddbmm(Bmm):
    """baddbmm(buffer, a, b, beta=0, alpha): batch1's gradient before batch2's, each a product times alpha."""

    node = "BaddbmmBackward0"
    aten = "aten.baddbmm"

    @staticmethod
    def saved_inputs(node: Node, a: Tensor, b: Tensor) -> Iterable[Tensor | None]:
        return (a if b.requires_grad else None, b if a.requires_grad else None)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (batch, m, k), n = node.metas[0][0], node.metas[1][0][2]
        dtype = first(gradients).dtype
        result: Gradients = [None, None]
        if node.needs(0):
            result[0] = scaled(tape, tape.matmul_out("aten::bmm", m, k, n, dtype, batch))
        if node.needs(1):
            result[1] = scaled(tape, tape.matmul_out("aten::bmm", k, n, m, dtype, batch))
        return result


def scaled(tape: Tape, x: Tensor) -> Tensor:
    """x times a number."""
    return tape.pointwise("aten::mul", x.shape, x.dtype, None, x.bytes)


@rule("linear")
def linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear on [..., in]. With bias the input is folded before weight.t(), without it after (visible in backward);
    two dimensions need no folding."""
    if tape.autocast_dtype:  # C++ evaluates arguments right to left
        bias = autocast_to(tape, bias, tape.autocast_dtype)
        weight = autocast_to(tape, weight, tape.autocast_dtype)  # type: ignore[assignment]
        x = autocast_to(tape, x, tape.autocast_dtype)  # type: ignore[assignment]
    rows, shape = prod(x.shape[:-1]), (*x.shape[:-1], weight.shape[0])
    if bias is not None:
        folded = reshape(tape, x, (rows, x.shape[-1]))
        w_t = tape.apply(T, (weight,), 0, 1)
        product = tape.apply(Addmm, (bias, folded, w_t), w_t.strides)
        return view(tape, product, shape, View)
    w_t = tape.apply(T, (weight,), 0, 1)
    if len(x.shape) == 2:
        product = tape.apply(Mm, (x, w_t), w_t.strides)
        return product
    folded = reshape(tape, x, (rows, x.shape[-1]))
    product = tape.apply(Mm, (folded, w_t), w_t.strides)
    return view(tape, product, shape, UnsafeView)


@rule("conv1d_linear")
def conv1d_linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """transformers' Conv1D: addmm with the weight as it is stored, [in, out]. Autocast casts from right to left."""
    folded = view(tape, x, (prod(x.shape[:-1]), x.shape[-1]))
    if tape.autocast_dtype:
        weight = autocast_to(tape, weight, tape.autocast_dtype)  # type: ignore[assignment]
        folded = autocast_to(tape, folded, tape.autocast_dtype)  # type: ignore[assignment]
        bias = autocast_to(tape, bias, tape.autocast_dtype)  # type: ignore[assignment]
    product = tape.apply(Addmm, (bias, folded, weight), weight.strides)
    return view(tape, product, (*x.shape[:-1], weight.shape[1]), View)


@rule("bmm")
def bmm(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    if tape.autocast_dtype:
        b = autocast_to(tape, b, tape.autocast_dtype)  # type: ignore[assignment]
        a = autocast_to(tape, a, tape.autocast_dtype)  # type: ignore[assignment]
    return tape.apply(Bmm, (a, b))


@rule("scaled_bmm")
def scaled_bmm(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    return tape.apply(Baddbmm, (a, b))
