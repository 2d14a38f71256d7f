"""Linear layers whose frozen weights are stored in four bits, as bitsandbytes' Linear4bit with NF4 (QLoRA)."""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.module import Buffer, Module, Parameter


class Nf4Weight(Buffer):
    """A weight [out, in]: two elements per byte, a scale per 64, and with double quantization scales of 8 bit with a
    scale per 256 of them. `tensor` holds the packed bytes, `scales` all that belongs to them."""

    __slots__ = ("double_quantization", "scales", "weight_shape")

    def __init__(self, outputs: int, inputs: int, double_quantization: bool) -> None:
        super().__init__("uint8", -(-outputs * inputs // 2))
        self.weight_shape = (outputs, inputs)
        self.double_quantization = double_quantization
        self.scales: tuple[Tensor, ...] = ()


class Linear4bit(Module):
    """x [..., in] times the dequantized weight; neither x nor the dequantized weight is kept for backward."""

    def __init__(self, weight: Parameter, double_quantization: bool) -> None:
        outputs, inputs = weight.shape
        self.weight = Nf4Weight(outputs, inputs, double_quantization)

    def forward(self, x: Tensor) -> Tensor:
        return F.nf4_linear(x, self.weight)
