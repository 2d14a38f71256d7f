"""Optimizer steps by the number of parameters, gradient norm and scaling: kernels over lists of tensors.

python -m calibration.measure.optimizers --device cpu --minutes 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from calibration.measure.case import Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.operands import Operands
from calibration.measure.recipes import Recipe, Shape, design

FAMILY = "optimizers"
TENSORS = 8
"""Into which the parameters are cut: a list of one would be a kernel of its own."""


def lists(count: int) -> Callable[[Operands, Shape], Sequence[Any]]:
    """So many lists of fp32 tensors, alike; all values positive, as second moments are."""

    def make(o: Operands, shape: Shape) -> Sequence[Any]:
        size = max(shape.rows * shape.width // TENSORS, 1)
        return [[o.random(size, dtype=torch.float32).abs_() for _ in range(TENSORS)] for _ in range(count)]

    return make


def adamw_operands(o: Operands, shape: Shape) -> Sequence[Any]:
    return [*lists(4)(o, shape), [o.one() for _ in range(TENSORS)]]


def adamw(parameters: Any, gradients: Any, first: Any, second: Any, steps: Any) -> None:
    torch.ops.aten._fused_adamw_(
        parameters, gradients, first, second, [], steps,
        lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


RECIPES = (
    Recipe("aten::_fused_adamw_", adamw_operands, adamw),
    Recipe("aten::_foreach_norm", lists(1), torch._foreach_norm),
    Recipe("aten::_foreach_mul_", lists(1), lambda x: torch._foreach_mul_(x, 0.999)),
    Recipe("aten::_foreach_copy_", lists(2), torch._foreach_copy_),
    Recipe("aten::_fused_sgd_", lists(3),
        lambda parameters, gradients, momenta: torch._fused_sgd_(
            parameters, gradients, momenta, weight_decay=0.0, momentum=0.9, lr=1e-4, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        ),
    ),
)  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    return design(RECIPES, device, FAMILY)


if __name__ == "__main__":
    main(FAMILY)
