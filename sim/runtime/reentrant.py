"""torch.utils.checkpoint(use_reentrant=True): a function of its own on the tape, whose backward runs a backward inside.

Forward runs without gradients and saves the tensor inputs. Backward runs the whole region again on detached inputs
(there is no early stop) and walks its graph back; the region's output is allocated again and lives until the inner walk
has ended, and so does the incoming gradient, so that the first accumulation in a residual block cannot be in place
(torch/utils/checkpoint.py, CheckpointFunction; Megatron's tensor_parallel.checkpoint is the same).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from sim.program.program import Owner
from sim.runtime.autograd import Gradients, Node
from sim.runtime.inner_backward import backward_inside, recomputing
from sim.runtime.ops.base import Op
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class _Function:
    """The region's function with the arguments that are not saved, and the autocast dtype of its forward.

    It lives as long as its node on the tape, until the loss dies.
    """

    def __init__(self, tape: Tape, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: bool) -> None:
        self.generator = tape.generator_state() if tape.grad_enabled else None
        self.function = function
        self.autocast_dtype = tape.autocast_dtype
        self.others = [None if isinstance(a, Tensor) and not (keywords and i) else a for i, a in enumerate(arguments)]

    def __call__(self, *tensors: Tensor) -> Any:
        rest = iter(tensors)
        return self.function(*(next(rest) if other is None else other for other in self.others))


class _Checkpoint(Op):
    """CheckpointFunction."""

    node = "CheckpointFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        for tensor in inputs:
            if tensor.requires_grad:
                tensor.storage.belongs_to(Owner.CHECKPOINT)
        return inputs

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> Any:
        *tensors, function = arguments
        with tape.grad_mode(False):
            return function(*tensors)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        function = node.attributes[0]
        inputs = detached(node, saved)
        output = rerun(tape, function, inputs, function.autocast_dtype)
        return backward_inside(tape, inputs, output, gradients)


def detached(node: Node, saved: list[Any]) -> list[Tensor]:
    """What was saved, as leaves of a graph of its own (detach_variable)."""
    inputs = [tensor.detach() for tensor in saved]
    for index, tensor in enumerate(inputs):
        tensor.requires_grad = node.needs(index)
    return inputs


def rerun(tape: Tape, function: Callable[..., Any], inputs: list[Tensor], autocast_dtype: str | None) -> Tensor:
    """Run a region again, with gradients."""
    with recomputing(tape):
        tape.recorder.host("checkpoint_region")
        with tape.autocast(autocast_dtype) if autocast_dtype else nullcontext():
            return Tensor.of(function(*inputs))


def checkpoint_reentrant(
    tape: Tape, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: bool = False
) -> Any:
    """Run `function(*arguments)` as a region. `None` cannot be an argument.

    `keywords`: all arguments but the first are passed by keyword. The reentrant form takes none, so that callers bind
    them to the function, and they are not saved but held.
    """
    if tape.grad_enabled:
        tape.recorder.host("checkpoint_region")
    bound = _Function(tape, function, arguments, keywords)
    tensors = tuple(a for a, other in zip(arguments, bound.others) if other is None)
    return tape.apply(_Checkpoint, tensors, bound)
