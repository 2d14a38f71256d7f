"""What is fused in Megatron's Llama-like layers: SwiGLU, squared ReLU, rotary positions, attention on [S, B, heads, D].

Source: megatron-core 0.16.1, fusions/fused_bias_swiglu.py; Transformer Engine, FusedRoPEFunc and FusedAttnFunc, read
there; no recording. Attention's workspaces in backward are those of flash-attn 2; cuDNN does not publish its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from sim.program.kernels import Attention
from sim.program.program import Owner
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class KeepsInput(Op):
    """One jitted kernel each way, which needs its input alone."""

    saves_late = True
    kernel: ClassVar[str]
    share: ClassVar[int]
    """Elements of the input per element of the result."""

    @staticmethod
    def saved_inputs(node: Node, x: Tensor) -> Iterable[Tensor | None]:
        return (x,)

    @classmethod
    def forward(cls, tape: Tape, x: Tensor) -> Tensor:
        return tape.pointwise(cls.kernel, (*x.shape[:-1], x.shape[-1] // cls.share), x.dtype, None, x.bytes)

    @classmethod
    def backward(cls, tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        x = saved[0]
        dx = tape.pointwise(f"{cls.kernel}_back", x.shape, x.dtype, None, x.bytes + first(gradients).bytes)
        gradients.clear()
        return [dx]


class SwiGlu(KeepsInput):
    """SwiGLUFunction over [..., 2 F], gate and value."""

    node = "SwiGLUFunctionBackward"
    kernel, share = "swiglu", 2


class SquaredRelu(KeepsInput):
    """squared_relu under Megatron's jit_fuser, that is torch.compile. (megatron/core/activations.py)"""

    node = "CompiledFunctionBackward"
    kernel, share = "squared_relu", 1


class FusedRope(Op):
    """A new tensor each way; saves the angles alone."""

    node = "FusedRoPEFuncBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, angles: Tensor) -> Iterable[Tensor | None]:
        return (angles,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, angles: Tensor) -> Tensor:
        return tape.pointwise("fused_rope_forward", x.shape, x.dtype, None, x.bytes + angles.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        moved = gradient.bytes + saved[0].bytes
        dx = tape.pointwise("fused_rope_backward", gradient.shape, gradient.dtype, None, moved)
        gradients.clear()
        return [dx, None]


class FusedAttention(Op):
    """Saves q, k, v, then out, log-sum-exp (fp32 [B, A, S]) and the state of the random numbers (16 B)."""

    node = "FusedAttnFuncBackward"
    saves_late = True
    saved_outputs = (0, 1, 2)
    not_differentiable = (1, 2)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor) -> Iterable[Tensor | None]:
        return (q, k, v)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, ...]:
        return attend(tape, q, k, causal=True, value_dim=v.shape[-1], window=window)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        q, k, v = saved[:3]
        result: Gradients = [*attend_back(tape, q, k, causal=True, value_dim=v.shape[-1], window=node.attributes[0])]
        gradients.clear()
        return result


def attend(
    tape: Tape, q: Tensor, k: Tensor, causal: bool, value_dim: int | None = None, past: int = 0, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """One kernel of q [S, B, A, D] over k (and v) [T, B, K, D]: out, log-sum-exp, random state.

    `value_dim`: width of a value and of the result, where it is not D. `past`: keys before the first query. `window`: keys
    that a query sees at most (0: all).
    """
    length, batch, heads, head_dim = q.shape
    out = tape.empty((*q.shape[:3], value_dim or head_dim), q.dtype)
    lse, rng = tape.empty((batch, heads, length), "fp32"), tape.empty((2,), "int64")
    tape.recorder.attention("fused_attn_fwd", _work(q, k, causal, False, value_dim, past, window))
    return out, lse, rng


def attend_back(
    tape: Tape, q: Tensor, k: Tensor, causal: bool, value_dim: int | None = None, past: int = 0, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward: dq, dk, dv in plain order, and the workspaces while it runs."""
    length, batch, heads, head_dim = q.shape
    dq, dk = tape.empty(q.shape, q.dtype), tape.empty(k.shape, k.dtype)
    dv = tape.empty((*k.shape[:3], value_dim or head_dim), k.dtype)
    rows = batch * heads * scratch.round_up(length, 128)
    width = scratch.round_up(head_dim, 32 if head_dim <= 128 else 64)
    workspaces = [tape.empty((rows * size,), "fp32", owner=Owner.WORKSPACE) for size in (1, width)]
    if k.shape[2] != heads:  # dk and dv for all heads, summed down afterwards
        shape = (*k.shape[:2], heads, head_dim)
        workspaces += [tape.empty(shape, k.dtype, owner=Owner.WORKSPACE) for _ in range(2)]
    tape.recorder.attention("fused_attn_bwd", _work(q, k, causal, True, value_dim, past, window))
    for full in workspaces[2:]:
        tape.recorder.memory_bound("aten::sum", "reduce", full.bytes + k.bytes)
    return dq, dk, dv


def _work(
    q: Tensor, k: Tensor, causal: bool, backward: bool, value_dim: int | None, past: int, window: int
) -> Attention:
    length, batch, heads, head_dim = q.shape
    return Attention(
        batch=batch, heads=heads, kv_heads=k.shape[2], q_len=length, kv_len=k.shape[0], head_dim=head_dim,
        causal=causal, backward=backward, dtype=q.dtype, past=past, window=window,
        value_head_dim=0 if value_dim in (None, head_dim) else value_dim or 0,
    )  # fmt: skip


@rule("swiglu")
def swiglu(tape: Tape, x: Tensor) -> Tensor:
    return tape.apply(SwiGlu, (x,))


@rule("squared_relu")
def squared_relu(tape: Tape, x: Tensor) -> Tensor:
    return tape.apply(SquaredRelu, (x,))


@rule("fused_rope")
def fused_rope(tape: Tape, x: Tensor, angles: Tensor) -> Tensor:
    return tape.apply(FusedRope, (x, angles))
