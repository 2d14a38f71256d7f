"""What a sharding family does at the places where the training script meets it."""

from __future__ import annotations

from collections.abc import Sequence

from sim.model.module import Module
from sim.runtime.optimizer import StepOptimizer, clip_grad_norm
from sim.runtime.optimizers import make_optimizer
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Optimizer


class Family:
    """Does nothing anywhere, and lets the script do what it does on one GPU."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def wrap(self, model: Module, blocks: Sequence[Module], outer: Sequence[Module]) -> None:
        """Wrap a model; `outer` are its blocks as wrapped by checkpointing."""

    def place(self) -> list[Tensor] | None:
        """Put the parameters on the device; returns those that the optimizer steps. None: the script does it."""
        return None

    def start(self, parameters: list[Tensor], buffers: list[Tensor]) -> None:
        """Parameters and buffers are on the device."""

    def make_optimizer(self, parameters: list[Tensor], setup: Optimizer) -> StepOptimizer:
        """The optimizer over what is stepped."""
        return make_optimizer(self.tape, parameters, setup)

    def begin(self, last: bool) -> None:
        """A micro-batch's forward comes; `last`: the step's last."""

    def clip(self, parameters: list[Tensor]) -> None:
        """Clip the gradients of these parameters by their norm."""
        clip_grad_norm(self.tape, parameters, 1)

    def finish(self) -> None:
        """Let go of everything, so that it dies without the collector."""
