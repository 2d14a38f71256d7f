"""What a chunked loss does beside forward operators: leaves, backwards inside the forward, a gradient known beforehand.

Order of allocations as in torchtitan's ChunkedCELoss, run on torch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class KnownGradient(Op):
    """A function from x to a value, which saves the gradient of x and hands it over."""

    node = "DecoderOutputGradientBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, gradient: Tensor, value: Tensor) -> Iterable[Tensor | None]:
        return (gradient,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [saved[0], None, None]


@rule("leaf")
def leaf(tape: Tape, x: Tensor) -> Tensor:
    detached = x.detach()
    detached.requires_grad = tape.records((x,))
    return detached


@rule("require_gradient")
def require_gradient(tape: Tape, x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


@rule("needs_gradient")
def needs_gradient(tape: Tape, x: Tensor) -> bool:
    return tape.records((x,))


@rule("backward")
def backward(tape: Tape, loss: Tensor) -> None:
    tape.backward(loss)


@rule("add_detached")
def add_detached(tape: Tape, total: Tensor, part: Tensor) -> Tensor:
    return tape.pointwise("aten::add", total.shape, total.dtype, None, total.bytes + part.bytes)


@rule("move_gradient")
def move_gradient(tape: Tape, x: Tensor, into: Tensor) -> None:
    gradient = x.grad
    assert gradient is not None
    if gradient.dtype != into.dtype:
        gradient = tape.cast_copy(gradient, into.dtype)
    tape.recorder.memory_bound("aten::copy_", "copy", 2 * gradient.bytes)
    x.grad = None


@rule("with_known_gradient")
def with_known_gradient(tape: Tape, x: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
    return tape.apply(KnownGradient, (x, gradient, value))
