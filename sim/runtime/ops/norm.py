"""Normalizations as one kernel. Statistics are fp32, one per row."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, ClassVar

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


def _forward(tape: Tape, kernel: str, family: str, x: Tensor, dtype: str, statistics: int) -> tuple[Tensor, ...]:
    """y and the statistics of its rows; x is read once, y written."""
    rows = prod(x.shape[:-1])
    outputs = (tape.empty(x.shape, dtype), *(tape.empty((rows,), "fp32") for _ in range(statistics)))
    tape.recorder.memory_bound(kernel, family, x.bytes + outputs[0].bytes)
    return outputs


def _backward(
    tape: Tape, kernel: str, family: str, node: Node, gradients: Gradients, in_parts: bool = True
) -> Gradients:
    """dx, dweight (and dbias), each if it is needed: x and the gradient are read, dx is written. `in_parts`: very many
    rows are summed for the weight in parts."""
    (shape, dtype), (_, weight_dtype), *_ = node.metas
    dx = tape.empty(shape, dtype) if node.needs(0) else None
    tape.recorder.memory_bound(kernel, family, 3 * first(gradients).bytes)
    wanted = [node.needs(number) for number in range(1, len(node.metas))]
    rows = prod(shape[:-1]) if in_parts else 0
    made = iter(norm_weight_gradients(tape, rows, shape[-1], weight_dtype, sum(wanted)) if any(wanted) else ())
    return [dx, *(next(made) if needed else None for needed in wanted)]


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
    def forward(tape: Tape, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return _forward(tape, "aten::_fused_rms_norm", "norm_forward", x, promote(x.dtype, weight.dtype), 1)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return _backward(tape, "aten::_fused_rms_norm_backward", "norm_backward", node, gradients)


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
    def forward(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return _forward(tape, "aten::native_layer_norm", "norm_forward", x, x.dtype, 2)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return _backward(tape, "aten::native_layer_norm_backward", "norm_backward", node, gradients)


class PersistentNorm(Op):
    """A row stays in registers: it is read once. Saves x, weight and the statistics; backward sums for the weight on the
    way, and its partial sums (a few rows of fp32) are left out."""

    saves_late = True
    kernels: ClassVar[tuple[str, str]]
    """Forward, backward."""

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor, *bias: Tensor) -> Iterable[Tensor | None]:
        return (x, weight)

    @classmethod
    def forward(cls, tape: Tape, x: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        return _forward(tape, cls.kernels[0], "persistent_norm_forward", x, x.dtype, len(cls.saved_outputs))

    @classmethod
    def backward(cls, tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return _backward(tape, cls.kernels[1], "persistent_norm_backward", node, gradients, in_parts=False)


class PersistentRmsNorm(PersistentNorm):
    """Transformer Engine's RMSNorm: y, rstd."""

    node = "_RMSNormBackward"
    saved_outputs = (1,)
    not_differentiable = (1,)
    kernels = "rmsnorm_fwd", "rmsnorm_bwd"


class PersistentLayerNorm(PersistentNorm):
    """FastLayerNormFN of apex: y, mean, rstd."""

    node = "FastLayerNormFNBackward"
    saved_outputs = (1, 2)
    not_differentiable = (1, 2)
    kernels = "ln_fwd", "ln_bwd"


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


@rule("persistent_rms_norm")
def persistent_rms_norm(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    return tape.apply_tuple(PersistentRmsNorm, (x, weight))[0]


@rule("persistent_layer_norm")
def persistent_layer_norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return tape.apply_tuple(PersistentLayerNorm, (x, weight, bias))[0]
