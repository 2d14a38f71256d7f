"""Rotary embedding as torchtitan writes it: products of complex numbers.

python -m calibration.measure.rope --device cpu --minutes 1
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

FAMILY = "rope"


def complex_pairs(o: Operands, shape: Shape) -> Sequence[Any]:
    """Two tensors of complex64, each element of which stands for two of fp32."""
    x, y = (o.random(shape.rows, shape.width, 2, dtype=torch.float32) for _ in range(2))
    return torch.view_as_complex(x), torch.view_as_complex(y)


RECIPES = (
    Recipe("aten::mul (complex)", complex_pairs, torch.mul),
    Recipe("aten::conj", complex_pairs, lambda x, _: torch.conj_physical(x)),
)


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
