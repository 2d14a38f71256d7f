"""Cross entropy in its parts: log-softmax and the choice of the target, forward and backward.

python -m calibration.measure.loss --device cpu --minutes 1
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

FAMILY = "loss"
WIDTH = 32_768
"""Of a row of logits: the vocabulary."""
MEAN, IGNORED = 1, -100
aten = torch.ops.aten


def choice(o: Operands, shape: Shape) -> Sequence[Any]:
    """A row of logits per target, few of them wide: only one element of each is read."""
    return o.random(shape.rows * shape.width, 2), o.integers(2, shape.rows * shape.width)


def choice_backward(o: Operands, shape: Shape) -> Sequence[Any]:
    logits, targets = o.random(*shape.both), o.integers(shape.width, shape.rows)
    loss, total = aten.nll_loss_forward(logits, targets, None, MEAN, IGNORED)
    return loss, logits, targets, total


RECIPES = (
    Recipe("aten::_log_softmax", same, lambda x: aten._log_softmax(x, -1, False)),
    Recipe("aten::_log_softmax_backward_data", two,
        lambda g, y: aten._log_softmax_backward_data(g, y, -1, y.dtype),
    ),
    Recipe("aten::nll_loss_forward", choice,
        lambda x, targets: aten.nll_loss_forward(x, targets, None, MEAN, IGNORED),
    ),
    Recipe("aten::nll_loss_backward", choice_backward,
        lambda loss, x, targets, total: aten.nll_loss_backward(loss, x, targets, None, MEAN, IGNORED, total),
    ),
)  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY, WIDTH)


if __name__ == "__main__":
    main(FAMILY)
