"""PyTorch on a CPU (torch 2.13, mkldnn off) where it differs from a GPU: a tape with the CPU's rules.

No workspaces and no kernel-internal buffers show in those measurements; dropout keeps its mask in the activations' dtype;
normalizations differ; a region keeps the generator's state on the device, which here is the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest

from sim.program.program import PHASE_SHIFT, Phase
from sim.runtime import checkpoint as checkpoint_module
from sim.runtime import reentrant as reentrant_module
from sim.runtime.autograd import Gradients, Node, SavedTensor
from sim.runtime.ops.base import Op, first
from sim.runtime.ops.matmul import Bmm
from sim.runtime.ops.norm import NativeLayerNorm
from sim.runtime.ops.pointwise import Mul
from sim.runtime.ops.views import Expand, UnsafeView, reshape
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor

GENERATOR_STATE_BYTES = 5056  # torch.get_rng_state() of the CPU's generator
DROPOUT_OPERATORS = 3  # empty_like, bernoulli_, div_ beside the product


class CpuTape(Tape):
    """Counts the operators that run again, views among them, as a dispatch mode does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.operators_again = 0

    def count(self, operators: int = 1) -> None:
        if self.grad_enabled and self.recorder.base >> PHASE_SHIFT == Phase.RECOMPUTE:
            self.operators_again += operators

    def _kernel(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        def kernel() -> Any:
            self.count()
            return op.forward(self, *inputs, *attributes)

        if self.selective is not None and op.aten:
            return self.selective.dispatch(op.aten, kernel)
        return kernel()

    def _apply(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        """A saved output that has a gradient is detached, which a dispatch mode sees where no hook packs it."""
        if self.records(inputs) and not self.hooks:
            self.count(len(set(op.saved_outputs) - set(op.not_differentiable)))
        return super()._apply(op, inputs, attributes)

    def scratch(self, *sizes_bytes: int) -> None:
        """Nothing: what a GPU's kernels need inside."""

    def matmul_out(self, name: str, m: int, n: int, k: int, dtype: str, batch: int = 0) -> Tensor:
        return self.empty((batch, m, n) if batch else (m, n), dtype)


class CpuLayerNorm(NativeLayerNorm):
    """Statistics in the input's dtype."""

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.elements // x.shape[-1]
        return tape.empty(x.shape, x.dtype), tape.empty((rows,), x.dtype), tape.empty((rows,), x.dtype)


class CpuFlash(Op):
    """_scaled_dot_product_flash_attention_for_cpu: out, lse fp32."""

    node = "ScaledDotProductFlashAttentionForCpuBackward0"
    aten = "aten._scaled_dot_product_flash_attention"
    saved_outputs: ClassVar[tuple[int, ...]] = (1, 0)
    not_differentiable: ClassVar[tuple[int, ...]] = (1,)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor) -> Iterable[Tensor | None]:
        return (k, q, v)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        b, a, s, d = q.shape
        out = tape.empty((b, s, a, d), q.dtype).alias((b, a, s, d), (s * a * d, d, a * d, 1))
        return out, tape.empty((b, a, s), "fp32")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        k, q, v, _lse, _out = saved
        first(gradients)
        return [tape.empty(x.shape, x.dtype, strides_like(x)) for x in (q, k, v)]


def _dropout(tape: CpuTape, x: Tensor, p: float) -> Tensor:
    """x * noise: the noise is kept."""
    noise = tape.empty(x.shape, x.dtype, strides_like(x))
    tape.count(DROPOUT_OPERATORS)
    return tape.apply(Mul, (x, noise))


def _attention(tape: CpuTape, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return tape.apply_tuple(CpuFlash, (q, k, v))[0]


def _layer_norm(tape: CpuTape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return tape.apply_tuple(CpuLayerNorm, (x, weight, bias))[0]


class _DivByNumber(Op):
    """x / number; the number is a tensor of 8 bytes, which is saved apart from all hooks (saved_variable.cpp)."""

    node = "DivBackward0"
    aten = "aten.div"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.empty(x.shape, x.dtype)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [tape.empty(*node.metas[0])]


class _MaskedFill(Op):
    """Saves the mask."""

    node = "MaskedFillBackward0"
    aten = "aten.masked_fill"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, mask: Tensor) -> Iterable[Tensor | None]:
        return (mask,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
        return tape.empty(x.shape, x.dtype)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [tape.empty(*node.metas[0]), None]


def _matmul(tape: CpuTape, a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul of four dimensions: both operands expanded and folded, then bmm."""
    (batch, heads, m, k), n = a.shape, b.shape[3]
    left = reshape(tape, tape.apply(Expand, (a,), a.shape), (batch * heads, m, k))
    right = reshape(tape, tape.apply(Expand, (b,), b.shape), (batch * heads, k, n))
    return tape.apply(UnsafeView, (tape.apply(Bmm, (left, right)),), (batch, heads, m, n), None)


def _div(tape: CpuTape, x: Tensor) -> Tensor:
    number = tape.empty((), "int64")
    out = tape.apply(_DivByNumber, (x,))
    if out.node is not None:
        hooks, tape.hooks = tape.hooks, []
        out.node.saved.append(SavedTensor(tape, number))
        tape.hooks = hooks
    return out


def _causal_mask(tape: CpuTape, length: int) -> Tensor:
    """tril(ones(n, n)) as bool, seen as [1, 1, n, n]."""
    ones = tape.empty((length, length), "bool")
    mask = tape.empty((length, length), "bool")
    del ones
    tape.count(3)
    return mask.alias((1, 1, length, length))


def _hide(tape: CpuTape, x: Tensor, mask: Tensor) -> Tensor:
    """x.masked_fill(~mask, -inf)."""
    tape.count()
    return tape.apply(_MaskedFill, (x, tape.empty(mask.shape, "bool")))


CpuTape.rules = Tape.rules | {
    "dropout": _dropout, "attention": _attention, "layer_norm": _layer_norm, "matmul": _matmul, "div": _div,
    "causal_mask": _causal_mask, "hide": _hide,
}  # fmt: skip


def keep_generator_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """preserve_rng_state: a region's frame (a reentrant region's node) holds the generator's state."""

    class Frame(checkpoint_module._Frame):
        def __init__(self, tape: Tape, *arguments: Any) -> None:
            self.generator = tape.empty((GENERATOR_STATE_BYTES,), "uint8")
            super().__init__(tape, *arguments)

    class Function(reentrant_module._Function):
        def __init__(self, tape: Tape, *arguments: Any) -> None:
            self.generator = tape.empty((GENERATOR_STATE_BYTES,), "uint8") if tape.grad_enabled else None
            super().__init__(tape, *arguments)

    monkeypatch.setattr(checkpoint_module, "_Frame", Frame)
    monkeypatch.setattr(reentrant_module, "_Function", Function)
