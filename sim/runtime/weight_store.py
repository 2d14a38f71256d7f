"""Backward in two passes as zero-bubble's Megatron does it: a linear layer puts its weight's gradient off and lets go of
all but its input and its output's gradient; everything else is done in the first pass, and the graph is freed behind it.

Source: sail-sg/zero-bubble-pipeline-parallelism, WeightGradStore in megatron/core/tensor_parallel/layers.py, read there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim.runtime.autograd import AccumulateGrad, Gradients
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class PutOff:
    """A weight's gradient that is still to be computed; `compute` holds what it needs, and gives None where it was added to
    the main gradient."""

    base: int
    operator: int
    compute: Callable[[], Tensor | None]
    accumulator: AccumulateGrad


class StoredWeights:
    """The backward of one micro-batch in one stage."""

    def __init__(self, tape: Tape, output: Tensor) -> None:
        self.tape = tape
        self.output = output
        self.put_off: list[PutOff] = []

    def input_gradient(self, gradient: Tensor | None) -> None:
        """First pass: gradients of inputs, and of all weights but those of linear layers."""
        self.tape.weight_store = self.put_off
        self.tape.backward(self.output, gradient)
        self.tape.weight_store = None

    def weight_gradients(self) -> None:
        """Second pass, in the order of the first."""
        self.tape.backward(self.output, self.output, self._compute)

    def _compute(self, root: object, gradients: Gradients) -> None:
        recorder = self.tape.recorder
        while self.put_off:
            entry = self.put_off.pop(0)
            recorder.enter_backward(entry.base, entry.operator)
            gradient = entry.compute()
            recorder.enter_backward(entry.accumulator.base, entry.accumulator.op.number)
            entry.accumulator.backward(self.tape, [gradient])
            del entry, gradient
