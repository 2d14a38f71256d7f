"""A function of long sequences tile by tile (DeepSpeed's TiledMLP): it keeps its input and nothing of what is between.

It runs again in backward, tile by tile, each with a backward of its own that adds to the parameters' gradients; hooks on
those wait for the last tile. Source: DeepSpeed 0.19, runtime/sequence_parallel/ulysses_sp.py, read there; no recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, prod
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.inner_backward import backward_inside, recomputing
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.cat import Cat
from sim.runtime.ops.views import reshaped
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

Function = Callable[[Tensor], Tensor]


class Tiled(Op):
    """x [B, S, H] in tiles of tokens: saves x."""

    node = "TiledMLPBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor) -> Iterable[Tensor | None]:
        return (x,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, function: Function, tiles: int) -> Tensor:
        with tape.grad_mode(False):
            batch, _, width = x.shape
            parts = [function(x.alias((batch, rows, width), x.strides)) for rows in _rows(x.shape[1], tiles)]
            return Cat.forward(tape, *parts, 1)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        function, tiles = node.attributes
        width = saved[0].shape[-1]
        x = reshaped(tape, saved[0], (prod(saved[0].shape[:-1]), width))
        incoming = reshaped(tape, first(gradients), x.shape)
        total = tape.pointwise("aten::zeros_like", x.shape, x.dtype, None, 0, "fill")
        counts = _rows(x.shape[0], tiles)
        for number, rows in enumerate(counts):
            tape.gradients_are_whole = number == len(counts) - 1
            tile = x.alias((rows, width))
            tile.requires_grad = node.needs(0)
            tile.grad = total.alias(tile.shape)  # its part of the gradient, which is added to
            with recomputing(tape):
                output = function(tile)
            backward_inside(tape, [tile], output, [incoming.alias(tile.shape)])
        gradients.clear()
        return [total.alias(saved[0].shape)]


def _rows(length: int, tiles: int) -> list[int]:
    """torch.chunk: equal parts, the last may be shorter."""
    most = ceil(length / tiles)
    return [min(most, length - begin) for begin in range(0, length, most)]


@rule("tiled")
def tiled(tape: Tape, function: Function, x: Tensor, tiles: int) -> Tensor:
    return tape.apply(Tiled, (x,), function, tiles)
