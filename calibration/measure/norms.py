"""Normalizations, forward and backward.

python -m calibration.measure.norms --device cpu --minutes 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from calibration.measure.case import Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.operands import Operands
from calibration.measure.recipes import Recipe, Shape, design

FAMILY = "norms"
EPSILON = 1e-5
aten = torch.ops.aten


def layer_norm(o: Operands, shape: Shape) -> Sequence[Any]:
    return o.random(*shape.both), [shape.width], o.random(shape.width), o.random(shape.width)


def layer_norm_backward(o: Operands, shape: Shape) -> Sequence[Any]:
    x, dims, weight, bias = layer_norm(o, shape)
    _, mean, rstd = aten.native_layer_norm(x, dims, weight, bias, EPSILON)
    return o.random(*shape.both), x, dims, mean, rstd, weight, bias


def rms_norm(o: Operands, shape: Shape) -> Sequence[Any]:
    return o.random(*shape.both), [shape.width], o.random(shape.width)


def rms_norm_backward(o: Operands, shape: Shape) -> Sequence[Any]:
    """A graph to walk back: on a CPU the backward is no operator of its own."""
    x, dims, weight = rms_norm(o, shape)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    with torch.enable_grad():
        y = torch.rms_norm(x, dims, weight, EPSILON)
    return y, inputs, o.random(*shape.both)


RECIPES = (
    Recipe("aten::native_layer_norm", layer_norm,
        lambda x, dims, weight, bias: aten.native_layer_norm(x, dims, weight, bias, EPSILON),
    ),
    Recipe("aten::native_layer_norm_backward", layer_norm_backward,
        lambda g, x, dims, mean, rstd, weight, bias: aten.native_layer_norm_backward(
            g, x, dims, mean, rstd, weight, bias, [True, True, True]
        ),
    ),
    Recipe("aten::_fused_rms_norm", rms_norm,
        lambda x, dims, weight: torch.rms_norm(x, dims, weight, EPSILON),
    ),
    Recipe("aten::_fused_rms_norm_backward", rms_norm_backward,
        lambda y, inputs, g: torch.autograd.grad(y, inputs, g, retain_graph=True),
    ),
)  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
