"""What a sharding family does at the places where the training script meets it."""

from __future__ import annotations

from typing import Protocol

from sim.model.module import Buffer, Parameter
from sim.runtime.sharding.ddp import Reducer
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Setup


class Family(Protocol):
    """One family, made once parameters and buffers are on the device."""

    def begin(self, last: bool) -> None:
        """A micro-batch's forward comes; `last`: the step's last."""

    def finish(self) -> None:
        """Let go of everything."""


def make_family(
    tape: Tape, setup: Setup, parameters: list[Tensor], tensors: list[tuple[str, Parameter | Buffer]]
) -> Family | None:
    """The family that a set-up asks for."""
    if setup.ddp is None:
        return None
    buffers = [slot.tensor for _, slot in tensors if isinstance(slot, Buffer) and isinstance(slot.tensor, Tensor)]
    return Reducer(tape, setup.ddp, [p for p in parameters if p.requires_grad], buffers)
