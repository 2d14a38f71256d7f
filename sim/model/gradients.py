"""What a model does to gradients by hand, as a script may: leaves, a backward inside forward, a gradient that is known."""

from __future__ import annotations

from sim.model.calls import Tensor, call


def leaf(x: Tensor) -> Tensor:
    """x.detach().requires_grad_() (or without, where x needs no gradient)."""
    return call("leaf", x)


def needs_gradient(x: Tensor) -> bool:
    """x.requires_grad."""
    return bool(call("needs_gradient", x))


def backward(loss: Tensor) -> None:
    """loss.backward()."""
    call("backward", loss)


def add_detached(total: Tensor, part: Tensor) -> Tensor:
    """total + part.detach()."""
    return call("add_detached", total, part)


def move_gradient(x: Tensor, into: Tensor) -> None:
    """A slice of `into` becomes x.grad, in into's dtype; x.grad = None."""
    call("move_gradient", x, into)


def with_known_gradient(x: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
    """`value`, whose backward gives x this gradient."""
    return call("with_known_gradient", x, gradient, value)
