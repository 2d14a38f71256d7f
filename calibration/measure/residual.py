"""Residual adds, and what else passes over a tensor once: casts, copies, sums, fills.

python -m calibration.measure.residual --device cpu --minutes 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from calibration.measure.case import Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.operands import Operands
from calibration.measure.recipes import Recipe, Shape, design, same, two

FAMILY = "residual"


def cast(o: Operands, shape: Shape) -> Sequence[Any]:
    """From fp32 to the dtype of compute; in fp32 a copy in plain order."""
    return o.random(*shape.both), o.random(*shape.both, dtype=torch.float32)


def parts(o: Operands, shape: Shape) -> Sequence[Any]:
    half = max(shape.rows // 2, 1)
    return ([o.random(half, shape.width), o.random(max(shape.rows - half, 1), shape.width)],)


RECIPES = (
    Recipe("aten::add", two, torch.add),
    Recipe("aten::add_", two, lambda x, y: x.add_(y)),
    Recipe("aten::mul", two, torch.mul),
    Recipe("aten::div", same, lambda x: x / 3.0),
    Recipe("aten::pow", same, lambda x: x.pow(2)),
    Recipe("aten::neg", same, torch.neg),
    Recipe("aten::copy_", two, lambda x, y: x.copy_(y)),
    Recipe("aten::clone", same, torch.clone),
    Recipe("aten::cat", parts, torch.cat),
    Recipe("aten::_to_copy", cast, lambda x, wide: x.copy_(wide)),
    Recipe("aten::sum", same, lambda x: x.sum(0)),
    Recipe("aten::mean", same, lambda x: x.mean(-1, keepdim=True)),
    Recipe("aten::zeros", same, torch.zeros_like),
    Recipe("aten::zeros_like", same, torch.zeros_like),
)


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
