"""SDPA's math kernel, written out as the operators it is made of (TAPE.md section 3 and 4, "math"); what attention that a
model writes out itself is made of: torch.matmul over heads, and softmax."""

from __future__ import annotations

from typing import Any

from sim.model.calls import Shape
from sim.runtime import strides as st
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.matmul import Bmm
from sim.runtime.ops.pointwise import Add, MulScalar, autocast_to, dropout, to
from sim.runtime.ops.views import Clone, Expand, UnsafeView, transpose, unsqueeze, view
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


class SafeSoftmax(Op):
    """result, three masks of fully hidden rows [dying inside]. Saves the result; one more temporary backward."""

    node = "SafeSoftmaxBackward0"
    aten = "aten._safe_softmax"
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        out = tape.pointwise("aten::_softmax", x.shape, x.dtype, None, x.bytes, "softmax")
        hidden = tape.pointwise("aten::eq", x.shape, "bool", None, x.bytes)
        rows = tape.pointwise("aten::all", (*x.shape[:-1], 1), "bool", None, hidden.bytes, "reduce")
        zero = tape.empty((), x.dtype)
        tape.recorder.memory_bound("aten::where", "elementwise", 2 * out.bytes)
        del zero, rows, hidden
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_softmax_gradient(tape, first(gradients))]


class Softmax(Op):
    """torch.softmax over the last dimension: saves its result; backward has one more temporary (grad * out)."""

    node = "SoftmaxBackward0"
    aten = "aten._softmax"
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, dtype: str) -> Tensor:
        return tape.pointwise("aten::_softmax", x.shape, dtype, strides_like(x), x.bytes, "softmax")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = _softmax_gradient(tape, first(gradients))
        return [gradient]


def _softmax_gradient(tape: Tape, gradient: Tensor) -> Tensor:
    out = tape.pointwise(
        "aten::_softmax_backward_data", gradient.shape, gradient.dtype, None, 2 * gradient.bytes, "softmax"
    )
    tape.scratch(out.bytes)
    return out


def _bmm_operand(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """expand + reshape of a 4-D operand to 3-D: a view where strides merge, else a clone and _unsafe_view."""
    if st.view(x.shape, x.strides, shape)[0]:
        return view(tape, x, shape)
    return tape.apply(UnsafeView, (tape.apply(Clone, (x,)),), shape, None)


def _for_all_heads(tape: Tape, x: Tensor, heads: int) -> Tensor:
    """enable_gqa in this kernel: repeat_interleave of the key heads [B, K, S, D], a copy in plain order."""
    batch, kv_heads, length, head_dim = x.shape
    each = (batch, kv_heads, heads // kv_heads, length, head_dim)
    expanded = tape.apply(Expand, (unsqueeze(tape, x, 2),), each)
    return view(tape, tape.apply(Clone, (expanded,)), (batch, heads, length, head_dim))


def _causal_bias(tape: Tape, length: int) -> Tensor:
    """ones(t, t).tril() as bool, two scalars, and the fp32 bias made of them."""
    ones = tape.pointwise("aten::ones", (length, length), "bool", None, 0)
    mask = tape.pointwise("aten::tril", (length, length), "bool", None, ones.bytes)
    del ones
    hidden, shown = tape.empty((), "fp32"), tape.empty((), "fp32")
    bias = tape.pointwise("aten::where", (length, length), "fp32", None, mask.bytes)
    del shown, hidden, mask
    return bias


def math_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool = True) -> Tensor:
    """Attention in fp32 on [B, heads, S, D] in any dtype; the result comes back in q's dtype.

    Dropout and fewer key heads as recorded with torch 2.14.
    """
    batch, heads, length, head_dim = q.shape
    dtype, n = q.dtype, batch * heads
    q32, k32, v32 = to(tape, q, "fp32"), to(tape, k, "fp32"), to(tape, v, "fp32")
    scaled_q = tape.apply(MulScalar, (q32,))
    bias = _causal_bias(tape, length) if causal else None
    all_k, all_v = k32, v32
    if k.shape[1] != heads:
        all_k, all_v = _for_all_heads(tape, k32, heads), _for_all_heads(tape, v32, heads)
    k_t = transpose(tape, all_k, 2, 3)
    scaled_k = tape.apply(MulScalar, (k_t,))
    left = _bmm_operand(tape, scaled_q, (n, length, head_dim))
    right = _bmm_operand(tape, scaled_k, (n, head_dim, length))
    scores = tape.apply(Bmm, (left, right))
    del left, right, scaled_k, k_t
    scores = tape.apply(UnsafeView, (scores,), (batch, heads, length, length), None)
    if bias is None:
        pass
    elif tape.selective is not None:  # not in place where a dispatch mode is active (attention.cpp)
        scores = tape.apply(Add, (scores, bias))
    else:
        tape.recorder.memory_bound("aten::add_", "elementwise", 2 * scores.bytes + length * length * 4)
    weights = tape.apply(SafeSoftmax, (scores,))
    del scores
    if dropout_p:
        weights = dropout(tape, weights, dropout_p)
    returned = to(tape, weights, dtype)
    flat = tape.apply(Expand, (weights,), (batch, heads, length, length))
    flat = tape.apply(UnsafeView, (flat,), (n, length, length), None)
    values = _bmm_operand(tape, all_v, (n, length, head_dim))
    out = tape.apply(Bmm, (flat, values))
    del flat, values
    out = tape.apply(UnsafeView, (out,), (batch, heads, length, head_dim), None)
    out = to(tape, out, dtype)
    del returned, bias, all_k, all_v, k32, v32
    return out


@rule("softmax")
def softmax(tape: Tape, x: Tensor, dtype: str | None) -> Tensor:
    """Under autocast in fp32. A wider dtype means a cast first, but for fp16 (SoftMax.cpp: one kernel does both)."""
    wide = dtype or ("fp32" if tape.autocast_dtype else x.dtype)
    if x.dtype != "fp16":
        x = to(tape, x, wide)
    result: Tensor = tape.apply(Softmax, (x,), wide)
    return result


@rule("matmul")
def matmul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul of [B, A, m, k] and [B, A, k, n]: one bmm over B x A, operands copied where strides ask for it."""
    if tape.autocast_dtype:  # C++ evaluates arguments right to left
        b = autocast_to(tape, b, tape.autocast_dtype)  # type: ignore[assignment]
        a = autocast_to(tape, a, tape.autocast_dtype)  # type: ignore[assignment]
    (batch, heads, m, k), n = a.shape, b.shape[3]
    left = _bmm_operand(tape, a, (batch * heads, m, k))
    right = _bmm_operand(tape, b, (batch * heads, k, n))
    product = tape.apply(Bmm, (left, right))
    del left, right
    result: Tensor = tape.apply(UnsafeView, (product,), (batch, heads, m, n), None)
    return result
