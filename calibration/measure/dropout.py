"""Dropout, forward and backward.

python -m calibration.measure.dropout --device cpu --minutes 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from calibration.measure.case import Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.operands import Operands
from calibration.measure.recipes import Recipe, Shape, design, same

FAMILY = "dropout"
PROBABILITY = 0.1
aten = torch.ops.aten


def backward(o: Operands, shape: Shape) -> Sequence[Any]:
    return o.random(*shape.both), o.mask(*shape.both)


RECIPES = (
    Recipe("aten::native_dropout", same, lambda x: aten.native_dropout(x, PROBABILITY, True)
    ),
    Recipe("aten::native_dropout_backward", backward,
        lambda g, mask: aten.native_dropout_backward(g, mask, 1 / (1 - PROBABILITY)),
    ),
)  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
