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
    Recipe("aten::add", "elementwise", 3, two, torch.add),
    Recipe("aten::add_", "elementwise", 3, two, lambda x, y: x.add_(y)),
    Recipe("aten::mul", "elementwise", 3, two, torch.mul),
    Recipe("aten::div", "elementwise", 2, same, lambda x: x / 3.0),
    Recipe("aten::pow", "elementwise", 2, same, lambda x: x.pow(2)),
    Recipe("aten::neg", "elementwise", 2, same, torch.neg),
    Recipe("aten::copy_", "copy", 2, two, lambda x, y: x.copy_(y)),
    Recipe("aten::clone", "copy", 2, same, torch.clone),
    Recipe("aten::cat", "copy", 2, parts, torch.cat),
    Recipe("aten::_to_copy", "elementwise", 1, cast, lambda x, wide: x.copy_(wide), extra_bytes=4),
    Recipe("aten::sum", "reduce", 1, same, lambda x: x.sum(0)),
    Recipe("aten::mean", "reduce", 1, same, lambda x: x.mean(-1, keepdim=True)),
    Recipe("aten::zeros", "fill", 1, same, torch.zeros_like),
    Recipe("aten::zeros_like", "fill", 1, same, torch.zeros_like),
)


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
