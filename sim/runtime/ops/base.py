"""What an operator's rule looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from sim.runtime.autograd import Gradients, Node
from sim.runtime.recorder import Operators
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

Rule = TypeVar("Rule", bound=Callable[..., Any])


class Op:
    """An autograd-visible operator.

    `node` is autograd's name, `aten` the dispatcher's (empty for views: they never reach selective checkpointing).
    Saved inputs come in the order of unpacking: alphabetical by argument name (TAPE_LLAMA_FSDP.md 0.2). Shapes that
    backward needs stand in `node.metas` (per input) and `node.attributes`; a rule holds no tensor between the passes.
    """

    node: ClassVar[str] = ""
    aten: ClassVar[str] = ""
    number: ClassVar[int]
    saved_outputs: ClassVar[tuple[int, ...]] = ()
    not_differentiable: ClassVar[tuple[int, ...]] = ()
    saves_late: ClassVar[bool] = False
    """Functions written in Python save after forward has run, the others save their inputs before."""

    splits: ClassVar[bool] = False
    """Does work in both passes of a split backward, though it has no weight (the chain's layer)."""

    def __init_subclass__(cls) -> None:
        cls.number = Operators.number(f"{cls.aten} ({cls.node})" if cls.aten else cls.node)

    @staticmethod
    def saved_inputs(node: Node, *inputs: Any) -> Iterable[Tensor | None]:
        return ()

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        raise NotImplementedError


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register the function that executes calls of `name`."""

    def register(function: Rule) -> Rule:
        Tape.rules[name] = function
        return function

    return register


def first(gradients: Gradients) -> Tensor:
    """The gradient of an operator's only differentiable output."""
    gradient = gradients[0]
    assert gradient is not None
    return gradient
