"""Activation functions, forward and backward.

python -m calibration.measure.activations --device cpu --minutes 1
"""

from __future__ import annotations

from collections.abc import Iterator

from calibration.measure.case import Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.recipes import Recipe, design, same, two

FAMILY = "activations"
aten = torch.ops.aten
RECIPES = (
    Recipe("aten::gelu", same, lambda x: aten.gelu(x)),
    Recipe("aten::gelu_backward", two, lambda g, x: aten.gelu_backward(g, x)),
    Recipe("aten::silu", same, lambda x: aten.silu(x)),
    Recipe("aten::silu_backward", two, lambda g, x: aten.silu_backward(g, x)),
    Recipe("aten::relu", same, lambda x: aten.relu(x)),
    Recipe("aten::threshold_backward", two, lambda g, x: aten.threshold_backward(g, x, 0)),
)


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
