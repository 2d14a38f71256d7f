"""Calls: what a model says while it runs, on tensors without values.

Model code reads like the PyTorch that it imitates. Every operator it uses becomes one call to the active interpreter,
which knows the rules (what is saved, allocated, launched). A tensor here is only a handle with a shape and a dtype;
CPython's own reference counting plays the part that it plays in PyTorch: a handle lives as long as a local, an
argument tuple or a saved tensor holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Shape = tuple[int, ...]


class Interpreter(Protocol):
    """Executes calls. `rules` maps an operator's name to a function of (interpreter, *arguments)."""

    rules: dict[str, Callable[..., Any]]

    def run_repeated(self, module: Any, arguments: tuple[Any, ...]) -> Any:
        """The forward of a module whose `repeat` is set."""

    def enter(self, path: str) -> int:
        """A module's forward begins; returns what `leave` needs."""

    def leave(self, token: int) -> None:
        """The module's forward ends, also by an exception."""

    def computing_loss(self, *logits: Tensor) -> AbstractContextManager[None]:
        """What runs inside belongs to the loss, not to the network; so do the logits."""

    def enable_grad(self) -> AbstractContextManager[None]:
        """torch.enable_grad()."""


class _Active:
    interpreter: Interpreter | None = None


@contextmanager
def interpret(interpreter: Interpreter) -> Iterator[None]:
    """Make `interpreter` execute all calls inside."""
    before, _Active.interpreter = _Active.interpreter, interpreter
    try:
        yield
    finally:
        _Active.interpreter = before


def active() -> Interpreter:
    """The interpreter that executes calls now. Raises RuntimeError outside `interpret`."""
    if _Active.interpreter is None:
        raise RuntimeError("a model ran outside an interpreter: wrap the run in `with interpret(tape)`")
    return _Active.interpreter


def call(name: str, *arguments: Any) -> Tensor:
    """Execute one operator that gives one tensor."""
    interpreter = active()
    result: Tensor = interpreter.rules[name](interpreter, *arguments)
    return result


def call_tuple(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Execute one operator that gives several tensors."""
    interpreter = active()
    results: tuple[Tensor, ...] = interpreter.rules[name](interpreter, *arguments)
    return results


class Tensor:
    """A handle: shape (sizes per dimension) and dtype, no values. Operators become calls."""

    __slots__ = ()
    shape: Shape
    dtype: str

    def __add__(self, other: Tensor | float) -> Tensor:
        return call("add", self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return call("mul", self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Tensor:
        return call("neg", self)

    def view(self, *shape: int) -> Tensor:
        return call("view", self, shape)

    def reshape(self, *shape: int) -> Tensor:
        """A view where strides allow it, else a copy."""
        return call("reshape", self, shape)

    def transpose(self, a: int, b: int) -> Tensor:
        return call("transpose", self, a, b)

    def permute(self, *order: int) -> Tensor:
        """Dimensions in another order: a view."""
        return call("permute_dimensions", self, order)

    def unsqueeze(self, dim: int) -> Tensor:
        return call("unsqueeze", self, dim)

    def expand(self, *shape: int) -> Tensor:
        return call("expand", self, shape)

    def contiguous(self) -> Tensor:
        return call("contiguous", self)

    def to(self, dtype: str) -> Tensor:
        return call("to", self, dtype)

    def float(self) -> Tensor:
        return call("to", self, "fp32")

    def split(self, size: int | tuple[int, ...]) -> tuple[Tensor, ...]:
        """Equal parts of `size` along the last dimension, or parts of these sizes."""
        return call_tuple("split", self, size)

    def chunk(self, chunks: int) -> tuple[Tensor, ...]:
        """So many views along dimension 1, the last may be shorter."""
        return call_tuple("chunk", self, chunks)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """x[..., start:start+length, ...] along `dim`."""
        return call("slice", self, dim, start, length)

    def select(self, dim: int, index: int) -> Tensor:
        """x[:, index], without dimension `dim`: a view."""
        return call("select", self, dim)

    def square(self) -> Tensor:
        """x.pow(2)."""
        return call("pow2", self)

    def mean_last(self) -> Tensor:
        """x.mean(-1, keepdim=True)."""
        return call("mean_last", self)

    def mean(self) -> Tensor:
        """Over all elements: a scalar."""
        return call("mean", self)

    def rsqrt(self) -> Tensor:
        return call("rsqrt", self)
