"""torchao's Float8Linear in eager mode, with a scale per tensor: what a compiled block fuses is a kernel each (torchao 0.18,
recorded on torch 2.14).

A cast takes a scale from the largest magnitude (through fp64), widens to fp32, multiplies, clamps, narrows. Products read a
factor along rows and the other along columns: what lies otherwise is copied. Nothing in 8 bit is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from sim.program.kernels import ITEM_BYTES
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import add, to
from sim.runtime.ops.views import T, reshaped
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

FP64 = "int64"
"""Stands for a number of eight bytes."""


class Cast(NamedTuple):
    """A tensor in 8 bit with its scale."""

    data: Tensor
    scale: Tensor


def _scale(tape: Tape, x: Tensor) -> Tensor:
    """One over the largest magnitude: abs, max (over a copy where x is transposed), then five kernels on a number."""
    recorder = tape.recorder
    magnitude = tape.pointwise("aten::abs", x.shape, x.dtype, x.strides, x.bytes)
    largest = tape.empty((), x.dtype)
    plain = tape.copy(magnitude) if x.strides is not None else None
    tape.scratch(*scratch.norm_buffers(tape.device, x.elements, ITEM_BYTES[x.dtype]))
    recorder.memory_bound("aten::max", "reduce", x.bytes)
    del plain, magnitude
    wide = tape.pointwise("aten::_to_copy", (), FP64, None, largest.bytes)
    clamped = tape.pointwise("aten::clamp", (), FP64, None, wide.bytes)
    reciprocal = tape.pointwise("aten::reciprocal", (), FP64, None, clamped.bytes)
    scale = tape.pointwise("aten::mul", (), FP64, None, reciprocal.bytes)
    del reciprocal, clamped
    narrow = tape.pointwise("aten::_to_copy", (), "fp32", None, scale.bytes)
    del scale, wide, largest
    return narrow


def _cast(tape: Tape, x: Tensor) -> Cast:
    """hp_tensor_to_float8_dynamic."""
    scale = _scale(tape, x)
    wide = tape.cast_copy(x, "fp32") if x.dtype != "fp32" else x
    scaled = tape.pointwise("aten::mul", x.shape, "fp32", x.strides, wide.bytes)
    del wide
    clamped = tape.pointwise("aten::clamp", x.shape, "fp32", x.strides, scaled.bytes)
    data = tape.pointwise("aten::_to_copy", x.shape, "fp8", x.strides, clamped.bytes)
    del clamped, scaled
    return Cast(data, scale)


def _product(tape: Tape, m: int, n: int, k: int, dtype: str, *turned: Tensor) -> Tensor:
    """[m, n] of two casts; `turned`: those that lie the other way and are copied first."""
    copies = [tape.copy(x) for x in turned]
    inverse = [tape.pointwise("aten::reciprocal", (), "fp32", None, 4) for _ in range(2)]
    out = tape.empty((m, n), dtype)
    tape.matmul_out("aten::_scaled_mm", m, n, k, "fp8", out=out)
    inverse.clear()
    copies.clear()
    return out


class Float8Matmul(Op):
    """matmul_with_hp_or_float8_args of x [..., k] and w_t [k, n]; saves both as they are."""

    node = "matmul_with_hp_or_float8_argsBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, w_t: Tensor) -> Iterable[Tensor | None]:
        return (x, w_t)

    @staticmethod
    def forward(tape: Tape, x: Tensor, w_t: Tensor) -> Tensor:
        (k, n), rows = w_t.shape, prod(x.shape[:-1])
        a, b = _cast(tape, x), _cast(tape, w_t)
        out = _product(tape, rows, n, k, x.dtype)
        del a, b
        return out.alias((*x.shape[:-1], n))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        x, w_t = saved
        (k, n), rows = w_t.shape, prod(x.shape[:-1])
        gradient = reshaped(tape, first(gradients), (rows, n))
        dtype = gradient.dtype
        g, weight = _cast(tape, gradient), _cast(tape, w_t)
        of_x = _product(tape, rows, k, n, dtype, weight.data)
        g_again, given = _cast(tape, gradient), _cast(tape, x)
        of_weight = _product(tape, n, k, rows, dtype, g_again.data, given.data)
        del g, weight, g_again, given, gradient
        gradients.clear()  # a function written in Python lets go of them before the engine casts its results
        turned = of_weight.alias((k, n), (1, k))
        return [of_x.alias(x.shape), turned]


@rule("float8_linear")
def float8_linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if tape.autocast_dtype:
        x = to(tape, x, tape.autocast_dtype)
    out = tape.apply(Float8Matmul, (x, tape.apply(T, (weight,), 0, 1)))
    return out if bias is None else add(tape, out, to(tape, bias, out.dtype))
