"""Megatron's checkpoint without output: a region whose result is thrown away once its consumer has run.

A norm's output is saved by the product that reads it, so that an ordinary region around the norm saves nothing. Here the
output's bytes go (resize_(0)) after the consumer's forward, and a hook on the gradient of the consumer's output runs the
region again and copies the result into the old storage (megatron/core/tensor_parallel/random.py, CheckpointWithoutOutput,
0.16.1). The recomputed result itself lives until the region's own backward, which is a backward inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.model.module import Module
from sim.program.program import Owner
from sim.runtime.autograd import Gradients, Node
from sim.runtime.inner_backward import backward_inside
from sim.runtime.ops.base import Op
from sim.runtime.reentrant import detached, rerun
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class _Run:
    """One run of the region: its output until that is restored, then the recomputed inputs and output."""

    def __init__(self, tape: Tape, function: Callable[..., Any]) -> None:
        self.tape = tape
        self.function = function
        self.output: Tensor | None = None
        self.inputs: list[Tensor] = []
        self.again: Tensor | None = None

    def recompute(self, gradients: Gradients) -> None:
        """The hook on a gradient: what was thrown away has its bytes again."""
        tape, output = self.tape, self.output
        assert output is not None
        node = output.node
        assert node is not None
        self.inputs = detached(node, [saved.unpack() for saved in node.saved])
        self.again = rerun(tape, self.function, self.inputs, None)
        output.storage.owner = int(Owner.RECOMPUTED)
        output.storage.fill()
        tape.recorder.memory_bound("aten::copy_", "copy", 2 * output.bytes)
        self.output = None


class _WithoutOutput(Op):
    """CheckpointWithoutOutputFunction."""

    node = "CheckpointWithoutOutputFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> Any:
        *tensors, run = arguments
        with tape.grad_mode(False):
            return run.function(*tensors)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (run,) = node.attributes
        inputs, run.inputs = run.inputs, []
        output, run.again = run.again, None
        assert output is not None
        return backward_inside(tape, inputs, output, gradients)


class DiscardedOutput(Module):
    """A module whose output is discarded when the consumer says so."""

    def __init__(self, tape: Tape, module: Module) -> None:
        self.tape = tape
        self.module = module
        self.path = module.path
        self._run: _Run | None = None

    def forward(self, *arguments: Any) -> Any:
        if not (self.tape.recomputes and self.tape.records(arguments)):
            return self.module(*arguments)
        run = _Run(self.tape, self.module)
        run.output = self.tape.apply(_WithoutOutput, arguments, run)
        self._run = run
        return run.output

    def discard(self, hook_tensor: Tensor) -> None:
        """Free the output; restore it as soon as the gradient of `hook_tensor` is there."""
        run, self._run = self._run, None
        if run is None or run.output is None or hook_tensor.node is None:
            return
        run.output.storage.drop()
        node = hook_tensor.node
        node.pre_hooks = [*(node.pre_hooks or []), run.recompute]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)


class Consumer(Module):
    """The module that reads a discarded output."""

    def __init__(self, module: Module, discarded: DiscardedOutput) -> None:
        self.module = module
        self.path = module.path
        self._source = (discarded,)  # in a tuple: it is no child

    def forward(self, *arguments: Any) -> Any:
        output = self.module(*arguments)
        self._source[0].discard(Tensor.of(output))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)
