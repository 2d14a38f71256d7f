"""Embedding, forward and backward.

python -m calibration.measure.embedding --device cpu --minutes 1
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

FAMILY = "embedding"
VOCABULARY = 8192
GRADIENT_ROWS = 1024
"""Of the table whose gradient is made: few, since filling it with zeros is a kernel of its own in a program."""
aten = torch.ops.aten


def table(o: Operands, shape: Shape) -> Sequence[Any]:
    return o.random(VOCABULARY, shape.width), o.integers(VOCABULARY, shape.rows)


def gradient(o: Operands, shape: Shape) -> Sequence[Any]:
    return o.random(*shape.both), o.integers(GRADIENT_ROWS, shape.rows)


RECIPES = (
    Recipe("aten::embedding", table, lambda weight, tokens: aten.embedding(weight, tokens)),
    Recipe("aten::embedding_dense_backward", gradient,
        lambda g, tokens: aten.embedding_dense_backward(g, tokens, GRADIENT_ROWS, -1, False),
    ),
)  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
