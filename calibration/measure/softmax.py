"""Softmax over rows, forward and backward: attention that is written out.

python -m calibration.measure.softmax --device cpu --minutes 1
"""

from __future__ import annotations

from collections.abc import Iterator

from calibration.measure.case import Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.recipes import Recipe, design, same, two

FAMILY = "softmax"
aten = torch.ops.aten
RECIPES = (
    Recipe("aten::_softmax", same, lambda x: aten._softmax(x, -1, False)),
    Recipe("aten::_softmax_backward_data", two,
        lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype),
    ),
)  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
