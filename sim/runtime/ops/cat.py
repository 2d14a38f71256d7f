"""torch.cat: a copy forward, views of the gradient backward."""

from __future__ import annotations

from typing import Any

from sim.runtime import strides as st
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class CatLast(Op):
    """torch.cat along the last dimension. Backward: views of the gradient."""

    node = "CatBackward0"
    aten = "aten.cat"

    @staticmethod
    def forward(tape: Tape, *parts: Tensor) -> Tensor:
        shape = (*parts[0].shape[:-1], sum(p.shape[-1] for p in parts))
        return tape.pointwise("aten::cat", shape, parts[0].dtype, None, sum(p.bytes for p in parts), "copy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        full = gradient.strides if gradient.strides is not None else st.plain(gradient.shape)
        return [gradient.alias(shape, st.normalize(shape, full)) for shape, _ in node.metas]


class Cat(Op):
    """torch.cat along another dimension, in plain order. Backward: views of the gradient."""

    node = "CatBackward0"
    aten = "aten.cat"

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> Tensor:
        *parts, dim = arguments
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        moved = sum(part.bytes for part in parts)
        return tape.pointwise("aten::cat", tuple(shape), parts[0].dtype, None, moved, "copy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return CatLast.backward(tape, node, gradients, saved)


@rule("cat")
def cat(tape: Tape, parts: tuple[Tensor, ...], dim: int) -> Tensor:
    return tape.apply(Cat, parts, dim)


@rule("cat_last")
def cat_last(tape: Tape, parts: tuple[Tensor, ...]) -> Tensor:
    return tape.apply(CatLast, parts)
