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

    def computing_loss(self, logits: Tensor) -> AbstractContextManager[None]:
        """What runs inside belongs to the loss, not to the network; so do the logits."""


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
        result: Tensor = call("add", self, other)
        return result

    def __mul__(self, other: Tensor | float) -> Tensor:
        result: Tensor = call("mul", self, other)
        return result

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Tensor:
        result: Tensor = call("neg", self)
        return result

    def view(self, *shape: int) -> Tensor:
        result: Tensor = call("view", self, shape)
        return result

    def reshape(self, *shape: int) -> Tensor:
        """A view where strides allow it, else a copy."""
        result: Tensor = call("reshape", self, shape)
        return result

    def transpose(self, a: int, b: int) -> Tensor:
        result: Tensor = call("transpose", self, a, b)
        return result

    def unsqueeze(self, dim: int) -> Tensor:
        result: Tensor = call("unsqueeze", self, dim)
        return result

    def expand(self, *shape: int) -> Tensor:
        result: Tensor = call("expand", self, shape)
        return result

    def contiguous(self) -> Tensor:
        result: Tensor = call("contiguous", self)
        return result

    def to(self, dtype: str) -> Tensor:
        result: Tensor = call("to", self, dtype)
        return result

    def float(self) -> Tensor:
        result: Tensor = call("to", self, "fp32")
        return result

    def split(self, size: int) -> tuple[Tensor, ...]:
        """Equal parts of `size` along the last dimension."""
        return call_tuple("split", self, size)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """x[..., start:start+length, ...] along `dim`."""
        result: Tensor = call("slice", self, dim, start, length)
        return result

    def square(self) -> Tensor:
        """x.pow(2)."""
        result: Tensor = call("pow2", self)
        return result

    def mean_last(self) -> Tensor:
        """x.mean(-1, keepdim=True)."""
        result: Tensor = call("mean_last", self)
        return result

    def mean(self) -> Tensor:
        """Over all elements: a scalar."""
        result: Tensor = call("mean", self)
        return result

    def rsqrt(self) -> Tensor:
        result: Tensor = call("rsqrt", self)
        return result
