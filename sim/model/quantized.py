"""Linear layers whose frozen weights are stored in four bits, as bitsandbytes' Linear4bit with NF4 (QLoRA)."""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.module import Buffer, Module, Parameter


class Nf4Weight(Buffer):
    """A weight [out, in]: two elements per byte, a scale per 64, and with double quantization scales of 8 bit with a
    scale per 256 of them. `tensor` holds the packed bytes, `scales` all that belongs to them."""

    __slots__ = ("double_quantization", "elsewhere", "scales", "weight_shape")

    def __init__(self, outputs: int, inputs: int, double_quantization: bool, elsewhere: bool = False) -> None:
        """`elsewhere`: the packed bytes are a parameter of their own, here are the scales alone."""
        super().__init__("uint8", -(-outputs * inputs // 2))
        self.elsewhere = elsewhere
        self.weight_shape = (outputs, inputs)
        self.double_quantization = double_quantization
        self.scales: tuple[Tensor, ...] = ()


class Linear4bit(Module):
    """x [..., in] times the dequantized weight; neither x nor the dequantized weight is kept for backward.

    `sharded`: for FSDP the packed bytes are seen as 16-bit numbers (bnb_4bit_quant_storage), a parameter [n, 1] that it
    splits like others; the scales stay whole on every rank.
    """

    def __init__(self, weight: Parameter, double_quantization: bool, sharded: bool = False) -> None:
        outputs, inputs = weight.shape
        self.quant_state: Nf4Weight | None = None
        if sharded:
            self.weight: Parameter | Nf4Weight = Parameter(-(-outputs * inputs // 4), 1)
            self.quant_state = Nf4Weight(outputs, inputs, double_quantization, elsewhere=True)
        else:
            self.weight = Nf4Weight(outputs, inputs, double_quantization)

    def forward(self, x: Tensor) -> Tensor:
        state = self.quant_state or self.weight
        assert isinstance(state, Nf4Weight)
        return F.nf4_linear(x, state)
