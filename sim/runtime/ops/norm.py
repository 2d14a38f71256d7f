"""Normalizations as one kernel. Statistics are fp32, one per row."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import autocast_to, promote
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


def norm_weight_gradients(tape: Tape, rows: int, width: int, dtype: str, buffers: int) -> Gradients:
    """Gradients of weight (and bias). Very many short rows: partial rows of up to 32 rows each, summed into new buffers
    (layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel)."""
    gradients: Gradients = [tape.empty((width,), dtype) for _ in range(buffers)]
    parts = scratch.norm_gradient_parts(tape.device, rows, width)
    if parts:
        partials = [tape.empty((parts, width), dtype) for _ in range(buffers)]
        for i in range(buffers):
            summed = tape.empty((width,), dtype)
            tape.scratch(*scratch.reduce_buffers(tape.device, parts, width))
            gradients[i] = summed
        del partials
    return gradients


class FusedRmsNorm(Op):
    """F.rms_norm: y, rstd. Saves x, weight, rstd. Backward: dx, dweight, each if it is needed."""

    node = "FusedRmsNormBackward0"
    aten = "aten._fused_rms_norm"
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor) -> Iterable[Tensor | None]:
        return (x, weight)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = tape.empty(x.shape, promote(x.dtype, weight.dtype))
        rstd = tape.empty((prod(x.shape[:-1]),), "fp32")
        tape.recorder.memory_bound("aten::_fused_rms_norm", "norm_forward", x.bytes + y.bytes)
        return y, rstd

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (shape, dtype), (_, weight_dtype) = node.metas
        dx = tape.empty(shape, dtype) if node.needs(0) else None
        moved = 3 * first(gradients).bytes
        tape.recorder.memory_bound("aten::_fused_rms_norm_backward", "norm_backward", moved)
        dweight = norm_weight_gradients(tape, prod(shape[:-1]), shape[-1], weight_dtype, 1) if node.needs(1) else [None]
        return [dx, *dweight]


class NativeLayerNorm(Op):
    """y, mean, rstd. Saves x, weight, bias, mean, rstd. Backward: dx, dweight, dbias, each if it is needed."""

    node = "NativeLayerNormBackward0"
    aten = "aten.native_layer_norm"
    saved_outputs = (1, 2)
    not_differentiable = (1, 2)

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterable[Tensor | None]:
        return (bias, x, weight)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = prod(x.shape[:-1])
        y, mean, rstd = tape.empty(x.shape, x.dtype), tape.empty((rows,), "fp32"), tape.empty((rows,), "fp32")
        tape.recorder.memory_bound("aten::native_layer_norm", "norm_forward", x.bytes + y.bytes)
        return y, mean, rstd

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (shape, dtype), (_, weight_dtype), _ = node.metas
        dx = tape.empty(shape, dtype) if node.needs(0) else None
        moved = 3 * first(gradients).bytes
        tape.recorder.memory_bound("aten::native_layer_norm_backward", "norm_backward", moved)
        wanted = [node.needs(1), node.needs(2)]
        made = iter(norm_weight_gradients(tape, prod(shape[:-1]), shape[-1], weight_dtype, sum(wanted)))
        return [dx, *(next(made) if needed else None for needed in wanted)]


@rule("rms_norm")
def rms_norm(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """Under autocast in fp32."""
    if tape.autocast_dtype:
        weight = autocast_to(tape, weight, "fp32")  # type: ignore[assignment]
        x = autocast_to(tape, x, "fp32")  # type: ignore[assignment]
    return tape.apply_tuple(FusedRmsNorm, (x, weight))[0]


@rule("layer_norm")
def layer_norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Under autocast in fp32."""
    if tape.autocast_dtype:
        bias = autocast_to(tape, bias, "fp32")
        weight = autocast_to(tape, weight, "fp32")  # type: ignore[assignment]
        x = autocast_to(tape, x, "fp32")  # type: ignore[assignment]
    return tape.apply_tuple(NativeLayerNorm, (x, weight, bias))[0]
