"""Operators that a CPU runs by other kernels than a GPU: each saves and allocates what it does there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from sim.program.kernels import Layout
from sim.runtime.autograd import Gradients, Node
from sim.runtime.cpu.tape import CpuTape
from sim.runtime.ops.base import Op, first
from sim.runtime.ops.norm import NativeLayerNorm
from sim.runtime.ops.pointwise import AddScalar, MeanLast, Mul, Pow, Rsqrt, to
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


def _run(tape: Tape, name: str, out: Tensor | None, reads: tuple[Layout, ...] | None = None, flops: int = 0) -> None:
    assert isinstance(tape, CpuTape)
    tape.recorder.run(name, out, reads, flops)


class CpuLayerNorm(NativeLayerNorm):
    """Statistics in the input's dtype."""

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.elements // x.shape[-1]
        made = tape.empty(x.shape, x.dtype), tape.empty((rows,), x.dtype), tape.empty((rows,), x.dtype)
        _run(tape, "aten::native_layer_norm", made[0])
        return made


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
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        b, a, s, d = q.shape
        out = tape.empty((b, s, a, d), q.dtype).alias((b, a, s, d), (s * a * d, d, a * d, 1))
        lse = tape.empty((b, a, s), "fp32")
        flops = _attention_flops(q, k, causal)
        _run(tape, f"aten::{FLASH}{CAUSAL * causal}", out, flops=flops)
        return out, lse

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        k, q, v, _lse, _out = saved
        first(gradients)
        (causal,) = node.attributes
        made: Gradients = [tape.empty(x.shape, x.dtype, strides_like(x)) for x in (q, k, v)]
        flops = 5 * _attention_flops(q, k, causal) // 2
        _run(tape, f"aten::{FLASH}_backward{CAUSAL * causal}", None, flops=flops)
        return made


FLASH, CAUSAL = "_scaled_dot_product_flash_attention_for_cpu", " (causal)"


def _attention_flops(q: Tensor, k: Tensor, causal: bool) -> int:
    b, a, s, d = q.shape
    return 4 * b * a * s * k.shape[2] * d // (2 if causal else 1)


def _dropout(tape: Tape, x: Tensor, p: float) -> Tensor:
    """x * noise, where noise is 0 or 1 / (1 - p): it is kept."""
    if p == 0:
        return x
    noise = tape.empty(x.shape, x.dtype, strides_like(x))
    plain = Layout(x.shape, x.dtype, x.strides)
    tape.reads(())
    for name in ("aten::bernoulli_", "aten::div_"):
        _run(tape, name, None, (plain,))
    return tape.apply(Mul, (x, noise))


def _attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, kernel: str = "sdpa", causal: bool = True
) -> Tensor:
    """Raises ValueError for what this kernel does not do: dropout, and attention written out by SDPA itself."""
    if dropout_p or kernel != "sdpa":
        raise ValueError("attention on a CPU: without dropout, and by the fused kernel")
    return tape.apply_tuple(CpuFlash, (q, k, v), causal)[0]


def _layer_norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return tape.apply_tuple(CpuLayerNorm, (x, weight, bias))[0]


def _rms_norm(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """A composite in fp32, weight and all (layer_norm.cpp, rms_norm_composite): its variables live to the end."""
    wide = to(tape, x, "fp32")
    root = tape.apply(Pow, (wide,))
    root = tape.apply(MeanLast, (root,))
    root = _add_in_place(tape, root)
    root = tape.apply(Rsqrt, (root,))
    result = tape.apply(Mul, (wide, root))
    result = tape.apply(Mul, (result, weight))
    return to(tape, result, x.dtype)


class _AddInPlace(AddScalar):
    """x.add_(number)."""

    aten = "aten.add_"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        _run(tape, "aten::add_", None)
        return x.detach()


def _add_in_place(tape: Tape, x: Tensor) -> Tensor:
    return tape.apply(_AddInPlace, (x,))


CpuTape.rules = Tape.rules | {
    "dropout": _dropout, "attention": _attention, "layer_norm": _layer_norm, "rms_norm": _rms_norm,
}  # fmt: skip
