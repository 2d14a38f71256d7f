"""Flash attention behind scaled_dot_product_attention, in 16 bit.

Logical shape [B, heads, S, D]; the usual memory order is [B, S, heads, D]. Sources: TAPE.md 3 and 4, TAPE_LLAMA_FSDP.md
0.5 (split keys), 1 (enable_gqa), 2.3 (strided copies under offload).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from sim.program.kernels import Attention
from sim.program.program import Owner
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first
from sim.runtime.strides import Strides, transpose
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


def token_major(x: Tensor) -> bool:
    """Is [B, heads, S, D] stored as plain [B, S, heads, D]? Flash works on that view and copies anything else."""
    return transpose(x.shape, x.strides, 1, 2)[1] is None


def token_major_strides(x: Tensor) -> Strides:
    """Strides of [B, heads, S, D] over plain [B, S, heads, D]."""
    batch, heads, length, head_dim = x.shape
    return transpose((batch, length, heads, head_dim), None, 1, 2)[1]


def _padded_head_dim(head_dim: int) -> int:
    """Flash rounds the accumulator's head dimension to 32, above 128 to 64."""
    return scratch.round_up(head_dim, 32 if head_dim <= 128 else 64)


def work_of(q: Tensor, k: Tensor, generation: str, backward: bool, causal: bool) -> Attention:
    batch, heads, q_len, head_dim = q.shape
    return Attention(
        batch=batch, heads=heads, kv_heads=k.shape[1], q_len=q_len, kv_len=k.shape[2], head_dim=head_dim,
        causal=causal, backward=backward, generation=generation, dtype=q.dtype,
    )  # fmt: skip


class Flash(Op):
    """out, lse fp32, [split accumulators, never with dropout], rng state 16 B, unused 8 B.

    Saves k, q, v (key, query, value), then lse, out, rng, unused (logsumexp, output, ...).
    """

    node = "ScaledDotProductFlashAttentionBackward0"
    aten = "aten._scaled_dot_product_flash_attention"
    saved_outputs: ClassVar[tuple[int, ...]] = (1, 0, 2, 3)
    not_differentiable: ClassVar[tuple[int, ...]] = (1, 2, 3)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor) -> Iterable[Tensor | None]:
        return (k, q, v)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool) -> tuple[Tensor, ...]:
        batch, heads, length, head_dim = q.shape
        out = tape.empty(q.shape, q.dtype, strides_like(q))
        lse = tape.empty((batch, heads, length), "fp32")
        splits = 1 if dropout_p else scratch.flash_splits(tape.device, batch * heads, length, k.shape[2], head_dim)
        accumulators = []
        if splits > 1:
            accumulators.append(tape.empty((splits, batch, heads, length), "fp32", owner=Owner.WORKSPACE))
            shape = (splits, batch, heads, length, _padded_head_dim(head_dim))
            accumulators.append(tape.empty(shape, "fp32", owner=Owner.WORKSPACE))
        rng, unused = tape.empty((2,), "int64"), tape.empty((1,), "int64")
        if dropout_p:
            rng = tape.empty((2,), "int64")
        tape.recorder.attention("aten::_flash_attention_forward", work_of(q, k, "flash2", False, causal))
        del accumulators
        return out, lse, rng, unused

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        k, q, v, _lse, out, _rng, _unused = saved
        return [*flash_backward(tape, first(gradients), q, k, v, out, node.attributes[1])]


def flash_backward(
    tape: Tape, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, and the workspaces while the kernel runs."""
    batch, heads, length, head_dim = q.shape
    plain_gradient = None if token_major(gradient) else tape.copy(gradient)
    plain_out = None if token_major(out) else tape.copy(out)
    dq = tape.empty(q.shape, q.dtype, strides_like(q))
    dk = tape.empty(k.shape, k.dtype, strides_like(k))
    dv = tape.empty(v.shape, v.dtype, strides_like(v))
    rows = scratch.round_up(length, 128)
    accumulators = [
        tape.empty((batch * heads * rows,), "fp32", owner=Owner.WORKSPACE),
        tape.empty((batch * rows * heads * _padded_head_dim(head_dim),), "fp32", owner=Owner.WORKSPACE),
    ]
    fewer_keys = k.shape[1] != heads
    if fewer_keys:  # full-head dk and dv, summed down afterwards
        accumulators += [tape.empty(q.shape, k.dtype, owner=Owner.WORKSPACE) for _ in range(2)]
    tape.recorder.attention("aten::_flash_attention_backward", work_of(q, k, "flash2", True, causal))
    if fewer_keys:
        for _ in range(2):
            tape.recorder.memory_bound("aten::sum", "reduce", q.bytes + k.bytes)
    del accumulators, plain_out, plain_gradient
    return dq, dk, dv
