"""The convolution of a patch embedding: kernel and stride are the same, so it is one product over patches.

What cuDNN's fp32 path allocates was seen with torch 2.14 (its library stood in for by one that does nothing); its
workspace depends on the algorithm that cuDNN chooses on a real GPU and is taken to be none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import autocast_to
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class PatchConvolution(Op):
    """Saves input and weight, needed or not: one formula makes all gradients.

    Backward: the gradient in plain order, dW; then the bias's sum.
    """

    node = "ConvolutionBackward0"
    aten = "aten.convolution"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Iterable[Tensor | None]:
        return (x, weight)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        batch, colours, height, width = x.shape
        h, _, patch, _ = weight.shape
        out = tape.empty((batch, h, height // patch, width // patch), x.dtype)
        rows = out.elements // h
        tape.recorder.gemm("aten::cudnn_convolution", rows, h, colours * patch * patch, x.dtype, 1)
        tape.recorder.memory_bound("aten::add_", "elementwise", 2 * out.bytes)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, (weight_shape, dtype) = first(gradients), node.metas[1]
        h, colours, patch, _ = weight_shape
        rows = gradient.elements // h
        result: Gradients = [None, None, None]
        if node.needs(1):
            plain = tape.copy(gradient) if gradient.strides is not None else None
            result[1] = tape.empty(weight_shape, dtype)
            tape.recorder.gemm("aten::convolution_backward", h, colours * patch * patch, rows, dtype, 1, over_rows=True)
            del plain
        if node.needs(2):
            result[2] = tape.empty((h,), dtype)
            tape.scratch(*scratch.reduce_buffers(tape.device, rows, h))
            tape.recorder.memory_bound("aten::sum", "reduce", gradient.bytes)
        return result


@rule("patch_convolution")
def patch_convolution(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if tape.autocast_dtype:  # C++ evaluates arguments right to left
        bias = autocast_to(tape, bias, tape.autocast_dtype)  # type: ignore[assignment]
        weight = autocast_to(tape, weight, tape.autocast_dtype)  # type: ignore[assignment]
        x = autocast_to(tape, x, tape.autocast_dtype)  # type: ignore[assignment]
    return tape.apply(PatchConvolution, (x, weight, bias))
