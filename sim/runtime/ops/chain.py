"""The operators of the chain toy: bytes and durations are given, none is PyTorch's."""

from __future__ import annotations

from typing import Any

from sim.model.config import ChainConfig
from sim.program.program import PHASE_SHIFT, Phase
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Storage, Tensor


class ChainLayer(Op):
    """Saves `activation_bytes`; where it shares its entry's storage, the entry is part of them."""

    node = "ChainLayerBackward"
    aten = "chain.layer"
    saved_outputs = (1,)
    not_differentiable = (1,)
    splits = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor) -> tuple[Tensor, ...]:
        return (x,) if node.attributes[0].shares_entry else ()

    @staticmethod
    def forward(tape: Tape, x: Tensor, config: ChainConfig, number: int) -> tuple[Tensor, Tensor]:
        shared = x.bytes if config.shares_entry else 0
        saved = tape.empty((config.activation_bytes[number] - shared,), "uint8")
        again = tape.recorder.base >> PHASE_SHIFT == Phase.RECOMPUTE
        duration = config.recompute_ns[number] if again else config.forward_ns[number]
        tape.recorder.fixed("chain::recompute" if again else "chain::forward", duration)
        return tape.empty((0,), "uint8"), saved

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        config, number = node.attributes
        weight_ns = config.weight_gradient_ns[number]
        if tape.splits == "weight":
            tape.recorder.fixed("chain::weight_gradient", weight_ns)
        else:
            whole_ns = config.backward_ns[number]
            tape.recorder.fixed("chain::backward", whole_ns if tape.splits is None else whole_ns - weight_ns)
        return [_weightless(tape, node)]


class ChainEntry(Op):
    """The entry of a region, as its checkpoint keeps it."""

    node = "ChainEntryBackward"
    aten = "chain.entry"

    @staticmethod
    def forward(tape: Tape, x: Tensor, entry_bytes: int) -> Tensor:
        return tape.empty((entry_bytes,), "uint8")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_weightless(tape, node)]


def _weightless(tape: Tape, node: Node) -> Tensor:
    """A gradient of the input's shape that holds no bytes: the textbook does not count gradients."""
    shape, dtype = node.metas[0]
    return Tensor(Storage(tape.recorder, 0, 0, tape.recorder.default_owner), shape, dtype)


@rule("chain_layer")
def chain_layer(tape: Tape, x: Tensor, config: ChainConfig, number: int) -> Tensor:
    return tape.apply_tuple(ChainLayer, (x,), config, number)[0]


@rule("chain_entry")
def chain_entry(tape: Tape, x: Tensor, entry_bytes: int) -> Tensor:
    return tape.apply(ChainEntry, (x,), entry_bytes) if tape.recomputes else x
