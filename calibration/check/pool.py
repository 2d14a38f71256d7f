"""Operands out of one pool of random numbers, larger than the last cache: each call gets the next ones, which no cache
holds. A training step touches more bytes than a cache holds between two uses of most of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calibration.check.operators import DTYPES
from sim.program.kernels import Layout

ALIGNMENT = 64
FLOATS = (torch.float32, torch.complex64)


class Pool:
    """Tensors that lie as a `Layout` says, over the pool's bytes in turn. Floats are between 0.5 and 1.5."""

    def __init__(self, size_bytes: int) -> None:
        self.values = torch.rand(size_bytes // 4).add_(0.5)
        self.at = 0

    def take(self, layouts: Sequence[Layout], below: int) -> list[torch.Tensor]:
        """One tensor for each; whole numbers are below `below` and not of the pool."""
        return [self._take(layout, below) for layout in layouts]

    def _take(self, layout: Layout, below: int) -> torch.Tensor:
        dtype = DTYPES[layout.dtype]
        strides = layout.strides if layout.strides is not None else _plain(layout.shape)
        size = 1 + sum((n - 1) * step for n, step in zip(layout.shape, strides))
        if dtype not in FLOATS:
            made = torch.randint(below, (size,)) if dtype == torch.int64 else torch.ones(size, dtype=dtype)
            return made.as_strided(layout.shape, strides)
        floats = size * (2 if dtype.is_complex else 1)
        if self.at + floats > len(self.values):
            if floats > len(self.values):
                self.values = torch.rand(2 * floats).add_(0.5)
            self.at = 0
        part = self.values[self.at : self.at + floats]
        self.at += -(-floats // ALIGNMENT) * ALIGNMENT
        if dtype.is_complex:
            part = torch.view_as_complex(part.view(-1, 2))
        return part.as_strided(layout.shape, strides, part.storage_offset())


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
