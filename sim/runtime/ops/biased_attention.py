"""SDPA with a bias on its scores: the memory-efficient kernel, in any dtype (flash takes no bias). Recorded, torch 2.14."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from sim.program.kernels import Attention
from sim.program.program import Owner
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.attention import CutHead, PadHead
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import autocast_to
from sim.runtime.ops.views import Expand
from sim.runtime.strides import Strides, transpose
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


def _token_major(x: Tensor) -> Strides:
    batch, heads, length, head_dim = x.shape
    return transpose((batch, length, heads, head_dim), None, 1, 2)[1]


def _work(q: Tensor, k: Tensor, backward: bool) -> Attention:
    batch, heads, q_len, head_dim = q.shape
    return Attention(
        batch=batch, heads=heads, kv_heads=heads, q_len=q_len, kv_len=k.shape[2], head_dim=head_dim,
        causal=False, backward=backward, generation="efficient", dtype=q.dtype,
    )  # fmt: skip


class BiasedAttention(Op):
    """[seed, offset: on the device without dropout only], out, log-sum-exp. Saves bias, k, q, v, then the results.

    Backward: dq, dk, dv, the bias's where it is needed, for every sequence of the batch; delta; the kernel's workspace.
    """

    node = "ScaledDotProductEfficientAttentionBackward0"
    aten = "aten._scaled_dot_product_efficient_attention"
    saved_outputs: ClassVar[tuple[int, ...]] = (1, 0)
    not_differentiable: ClassVar[tuple[int, ...]] = (1, 2, 3)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Iterable[Tensor | None]:
        return (bias, k, q, v)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        batch, heads, length, _ = q.shape
        out = tape.empty(q.shape, q.dtype, _token_major(q))
        rows = scratch.round_up(length, 32) if tape.records((q, k, v, bias)) else 0
        lse = tape.empty((batch, heads, rows), "fp32")
        tape.recorder.attention("aten::_efficient_attention_forward", _work(q, k, False))
        return out, lse

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        _bias, k, q, v = saved[:4]
        batch, heads, length, head_dim = q.shape
        result: Gradients = [tape.empty(x.shape, x.dtype, _token_major(x)) for x in (q, k, v)]
        keys = scratch.round_up(k.shape[2], 16)
        result.append(tape.empty((batch, heads, length, keys), q.dtype) if node.needs(3) else None)
        if result[3] is not None:
            result[3].shape = (batch, heads, length, k.shape[2])  # what is seen of it
        held = delta(tape, q)
        tape.scratch(scratch.efficient_backward_workspace(tape.device, batch * heads, length, head_dim))
        tape.recorder.attention("aten::_efficient_attention_backward", _work(q, k, True))
        del held
        assert first(gradients) is not None
        return result


class BiasedAttentionWithoutDropout(BiasedAttention):
    saved_outputs: ClassVar[tuple[int, ...]] = (1, 0, 2, 3)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        seed, offset = tape.empty((), "int64"), tape.empty((), "int64")
        return (*BiasedAttention.forward(tape, q, k, v, bias), offset, seed)


def delta(tape: Tape, q: Tensor) -> Tensor:
    """(grad * out).sum(-1): made by the kernel in 16 bit, before it in fp32."""
    batch, heads, length, _ = q.shape
    if q.dtype != "fp32":
        return tape.empty((batch, heads, length), "fp32", owner=Owner.WORKSPACE)
    product = tape.pointwise("aten::mul", q.shape, q.dtype, strides_like(q), 2 * q.bytes)
    total = tape.pointwise("aten::sum", (batch, heads, length), "fp32", None, product.bytes, "reduce")
    return tape.copy(total)


class Where(Op):
    """torch.where(condition, x, number): a scalar, the result. Saves the condition; backward the same again."""

    node = "WhereBackward0"
    aten = "aten.where"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, condition: Tensor) -> Iterable[Tensor | None]:
        return (condition,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, condition: Tensor) -> Tensor:
        scalar = tape.empty((), x.dtype)
        out = tape.pointwise("aten::where", x.shape, x.dtype, strides_like(x), x.bytes + condition.bytes)
        del scalar
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [Where.forward(tape, first(gradients), saved[0]), None]


@rule("where")
def where(tape: Tape, condition: Tensor, x: Tensor) -> Tensor:
    return tape.apply(Where, (x, condition))


@rule("biased_attention")
def biased_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout_p: float) -> Tensor:
    """`bias` [1, A, Q, K] in plain order; seen once per sequence."""
    if tape.autocast_dtype:
        bias = autocast_to(tape, bias, tape.autocast_dtype)  # type: ignore[assignment]
        v = autocast_to(tape, v, tape.autocast_dtype)  # type: ignore[assignment]
        k = autocast_to(tape, k, tape.autocast_dtype)  # type: ignore[assignment]
        q = autocast_to(tape, q, tape.autocast_dtype)  # type: ignore[assignment]
    keys = bias.shape[3]
    aligned = bias  # which the caller holds as it came
    if keys % 8:
        aligned = tape.apply(CutHead, (tape.apply(PadHead, (bias,)),), keys)
    wide = tape.apply(Expand, (aligned,), (q.shape[0], *bias.shape[1:]))
    op = BiasedAttention if dropout_p else BiasedAttentionWithoutDropout
    result: Tensor = tape.apply_tuple(op, (q, k, v, wide))[0]
    return result
