"""Fused attention kernels behind scaled_dot_product_attention: flash in 16 bit, memory-efficient in fp32.

Logical shape [B, heads, S, D]; the usual memory order is [B, S, heads, D]. Sources: TAPE.md 3 and 4 (flash, efficient),
TAPE_LLAMA_FSDP.md 0.5 (split keys), 0.6 (padding), 1 (enable_gqa), 2.3 (strided copies under offload).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from sim.program.program import Owner
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.attention_math import math_attention
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.flash import Flash, token_major_strides, work_of
from sim.runtime.ops.pointwise import autocast_to
from sim.runtime.ops.ring_sdpa import RingFlash
from sim.runtime.strides import Strides
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


class Efficient(Op):
    """fp32: [seed 8 B, offset 8 B], out, lse fp32 padded to 32. With dropout seed and offset live on the CPU; lse is
    empty where nothing needs a gradient.

    Results and gradients are stored as plain [B, S, heads, D], whatever the order of q, k and v (attention.cu).
    With fewer key heads backward also makes dk and dv for all heads, which are summed down (recorded, torch 2.14).
    """

    node = "ScaledDotProductEfficientAttentionBackward0"
    aten = "aten._scaled_dot_product_efficient_attention"
    saved_outputs: ClassVar[tuple[int, ...]] = (1, 0, 2, 3)
    not_differentiable: ClassVar[tuple[int, ...]] = (1, 2, 3)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor) -> Iterable[Tensor | None]:
        return (k, q, v)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
        seed, offset = tape.empty((), "int64"), tape.empty((), "int64")
        out, lse = _efficient_outputs(tape, q, k, v, causal)
        return out, lse, offset, seed

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        k, q, v = saved[:3]
        batch, heads, length, head_dim = q.shape
        result: Gradients = [tape.empty(x.shape, x.dtype, token_major_strides(x)) for x in (q, k, v)]
        fewer_keys = k.shape[1] != heads
        full_heads = [tape.empty(q.shape, k.dtype, owner=Owner.WORKSPACE) for _ in range(2)] if fewer_keys else []
        # delta = (grad * out).sum(-1), made contiguous
        product = tape.pointwise("aten::mul", q.shape, q.dtype, strides_like(q), 2 * q.bytes)
        delta = tape.pointwise("aten::sum", (batch, heads, length), "fp32", None, product.bytes, "reduce")
        plain = tape.copy(delta)
        del delta, product
        tape.scratch(scratch.efficient_backward_workspace(tape.device, batch * heads, length, head_dim))
        work = work_of(q, k, "efficient", True, node.attributes[0])
        tape.recorder.attention("aten::_efficient_attention_backward", work)
        for _ in full_heads:
            tape.recorder.memory_bound("aten::sum", "reduce", q.bytes + k.bytes)
        del plain, full_heads
        return result


class EfficientDropout(Efficient):
    saved_outputs = (1, 0)
    not_differentiable = (1,)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
        return _efficient_outputs(tape, q, k, v, causal)


def _efficient_outputs(tape: Tape, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The log-sum-exp is computed for a backward only (recorded: none under no_grad)."""
    batch, heads, length, _ = q.shape
    out = tape.empty(q.shape, q.dtype, token_major_strides(q))
    rows = scratch.round_up(length, 32) if tape.records((q, k, v)) else 0
    lse = tape.empty((batch, heads, rows), "fp32")
    tape.recorder.attention("aten::_efficient_attention_forward", work_of(q, k, "efficient", False, causal))
    return out, lse


class PadHead(Op):
    """Head dimension filled up to a multiple of 8, in plain order; backward cuts it off with a copy."""

    node = "ConstantPadNdBackward0"
    aten = "aten.constant_pad_nd"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], scratch.round_up(x.shape[-1], 8))
        return tape.pointwise("aten::constant_pad_nd", shape, x.dtype, None, x.bytes, "copy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        strides = strides_like(gradient)
        narrow = _narrowed(gradient.shape, strides, node.metas[0][0][-1])
        return [tape.pointwise("aten::clone", node.metas[0][0], gradient.dtype, narrow, 2 * gradient.bytes, "copy")]


def _narrowed(shape: tuple[int, ...], strides: Strides, width: int) -> Strides:
    """Dense strides in the same order once the last dimension is `width` wide."""
    if strides is None:
        return None
    return tuple(s // shape[-1] * width if s > 1 else s for s in strides)


class CutHead(Op):
    """The padded output cut to the real head dimension: a view; backward fills zeros around the gradient."""

    node = "SliceBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, head_dim: int) -> Tensor:
        full = x.strides
        if full is None:
            from sim.runtime.strides import plain

            full = plain(x.shape)
        return x.alias((*x.shape[:-1], head_dim), full)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [tape.pointwise("aten::zeros", node.metas[0][0], gradient.dtype, None, 2 * gradient.bytes, "fill")]


def _fused_kernel_takes(tape: Tape, q: Tensor) -> bool:
    """sdp_utils.cpp: before 8.0 none takes bf16; from 8.0 on the efficient one wants fp32 heads of a multiple of 4."""
    if tape.device.compute_capability < 80:
        return q.dtype != "bf16"
    return q.dtype != "fp32" or q.shape[-1] % 4 == 0


@rule("attention")
def attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, kernel: str, causal: bool = True
) -> Tensor:
    """SDPA, with is_causal or without any mask.

    `kernel`: "sdpa" lets PyTorch pick (flash in 16 bit, efficient in fp32), "math" forces that kernel.

    Not known: fp16 before compute capability 8.0, which takes the efficient kernel and is treated here like flash.
    """
    if tape.autocast_dtype:
        v = autocast_to(tape, v, tape.autocast_dtype)  # type: ignore[assignment]
        k = autocast_to(tape, k, tape.autocast_dtype)  # type: ignore[assignment]
        q = autocast_to(tape, q, tape.autocast_dtype)  # type: ignore[assignment]
    if kernel == "math" or not _fused_kernel_takes(tape, q):
        return math_attention(tape, q, k, v, dropout_p, causal)
    if q.dtype == "fp32":
        op = EfficientDropout if dropout_p else Efficient
        result: Tensor = tape.apply_tuple(op, (q, k, v), causal)[0]
        return result
    head_dim = q.shape[-1]
    if head_dim % 8:
        q, k, v = (tape.apply(PadHead, (x,)) for x in (q, k, v))
        out = attention(tape, q, k, v, dropout_p, kernel, causal)
        result = tape.apply(CutHead, (out,), head_dim)
        return result
    if tape.context is not None:
        return tape.apply_tuple(RingFlash, (q, k, v), dropout_p, tape.context.degree, tape.context.kind)[0]
    return tape.apply_tuple(Flash, (q, k, v), dropout_p, causal)[0]
