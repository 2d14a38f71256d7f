"""Random operands, in as many sets as it takes that a call finds none of its own in the last cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from math import ceil
from typing import Any

from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.timing import Call

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int64": torch.int64,
    "bool": torch.bool,
}
MOST_SETS = 64
"""Of operands. More would rotate smaller ones through the whole cache, which their launch hides."""
SHARE_OF_FREE_MEMORY = 0.5


class Operands:
    """Makes tensors on one device; floating ones of `dtype` unless said otherwise."""

    def __init__(self, device: Device, dtype: str) -> None:
        self.device = device.torch_device
        self.dtype = DTYPES[dtype]

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype).normal_()

    def one(self) -> torch.Tensor:
        """A scalar in fp32, as optimizers count their steps."""
        return torch.ones((), device=self.device)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Below `high`."""
        return torch.randint(high, shape, device=self.device)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device) < 0.5


def rotated(device: Device, make: Callable[[], Sequence[Any]], call: Callable[..., object]) -> Call:
    """`call` on one set of operands after the other, without gradients; a new set is made by `make`."""
    with torch.no_grad():
        sets = [tuple(make())]
        size = max(tensor_bytes(sets[0]), 1)
        wanted = min(ceil(device.rotation_bytes / size) + 1, MOST_SETS) if device.rotation_bytes else 1
        affordable = int(device.free_bytes() * SHARE_OF_FREE_MEMORY / size)
        sets += [tuple(make()) for _ in range(min(wanted, affordable) - 1)]
    ring = cycle(sets)

    def run() -> object:
        with torch.no_grad():
            return call(*next(ring))

    return run


def tensor_bytes(operands: Any) -> int:
    """Of all tensors in nested lists and tuples."""
    if isinstance(operands, torch.Tensor):
        return operands.numel() * operands.element_size()
    return sum(map(tensor_bytes, operands)) if isinstance(operands, list | tuple) else 0
