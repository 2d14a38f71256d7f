"""Four-bit weights: how they get to the device, and products with them (bitsandbytes 0.50, recorded on torch 2.14).

MatMul4Bit dequantizes the weight into a temporary for the product, and again in backward for the input's gradient.
"""

from __future__ import annotations

from math import prod
from typing import Any

from sim.model.quantized import Nf4Weight
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.views import reshaped
from sim.runtime.scratch import ceil_div
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

BLOCK, SCALE_BLOCK = 64, 256
"""Elements per scale, scales per scale of scales."""
CODE, MAP = 16, 256
"""Entries of the NF4 code and of the map of 8-bit values."""


class Quantizer:
    """Params4bit.to(device): the weight arrives in 16 or 32 bit, is quantized there and dropped."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._map: Tensor | None = None  # bitsandbytes keeps one for all

    def place(self, weight: Nf4Weight, dtype: str) -> None:
        """Put one weight on the device. `dtype`: what it is dequantized to."""
        tape, elements = self.tape, prod(weight.weight_shape)
        whole = tape.empty(weight.weight_shape, dtype)
        scales = tape.empty((ceil_div(elements, BLOCK),), "fp32")
        weight.tensor = tape.empty(weight.shape, "uint8")
        tape.recorder.memory_bound("bitsandbytes::quantize_4bit", "elementwise", whole.bytes + scales.bytes)
        code = tape.empty((CODE,), "fp32")
        absolute, largest = tape.empty((CODE,), "fp32"), tape.empty((), "fp32")
        del absolute, largest
        weight.scales = (code, *self._quantized_scales(scales)) if weight.double_quantization else (code, scales)
        if weight.elsewhere:
            weight.tensor = None
        del scales, whole

    def _quantized_scales(self, scales: Tensor) -> tuple[Tensor, ...]:
        tape = self.tape
        mean = tape.empty((), "fp32")
        centred = tape.empty(scales.shape, "fp32")
        if self._map is None:
            self._map = tape.empty((MAP,), "fp32")
        outer = tape.empty((ceil_div(scales.elements, SCALE_BLOCK),), "fp32")
        inner = tape.empty(scales.shape, "uint8")
        own_map = tape.empty((MAP,), "fp32")
        tape.recorder.memory_bound("bitsandbytes::quantize_blockwise", "elementwise", scales.bytes + inner.bytes)
        del centred
        return mean, outer, inner, own_map


def _scales_of(tape: Tape, weight: Nf4Weight) -> Tensor | None:
    """The dequantized scales, a temporary of double quantization."""
    if not weight.double_quantization:
        return None
    scales = tape.empty((ceil_div(prod(weight.weight_shape), BLOCK),), "fp32")
    tape.recorder.memory_bound("bitsandbytes::dequantize_blockwise", "elementwise", 5 * scales.elements)
    return scales


def _dequantized(tape: Tape, weight: Nf4Weight, dtype: str) -> Tensor:
    scale_bytes = 4 * ceil_div(prod(weight.weight_shape), BLOCK)
    read_bytes = prod(weight.shape) + scale_bytes
    return tape.pointwise("bitsandbytes::dequantize_4bit", weight.weight_shape, dtype, None, read_bytes)


class MatMul4Bit(Op):
    """Saves nothing of the input: the weight never gets a gradient."""

    node = "MatMul4BitBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Nf4Weight) -> Tensor:
        (n, k), rows = weight.weight_shape, prod(x.shape[:-1])
        scales = _scales_of(tape, weight)
        shifted = None
        if scales is not None:
            shifted = tape.pointwise("aten::add", scales.shape, "fp32", None, scales.bytes)
        whole = _dequantized(tape, weight, x.dtype)
        folded = reshaped(tape, x, (rows, k))
        product = tape.matmul_out("aten::mm", rows, n, k, x.dtype)
        del folded, shifted, scales, whole
        return Tensor(product.storage, (*x.shape[:-1], n), x.dtype)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        weight: Nf4Weight = node.attributes[0]
        gradient, (shape, dtype) = first(gradients), node.metas[0]
        (n, k), rows = weight.weight_shape, prod(shape[:-1])
        scales = _scales_of(tape, weight)
        if scales is not None:
            tape.recorder.memory_bound("aten::add_", "elementwise", 2 * scales.bytes)
        whole = _dequantized(tape, weight, dtype)
        del scales
        folded = reshaped(tape, gradient, (rows, n))
        product = tape.matmul_out("aten::mm", rows, k, n, dtype)
        del folded, whole
        return [Tensor(product.storage, shape, dtype)]


@rule("nf4_linear")
def nf4_linear(tape: Tape, x: Tensor, weight: Nf4Weight) -> Tensor:
    return tape.apply(MatMul4Bit, (x,), weight)
