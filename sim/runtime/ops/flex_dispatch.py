"""Megatron's flex dispatcher with DeepEP's HybridEP: a token goes once to each rank that has some of its experts, and rows
are sorted by expert on arrival; results are summed per rank before they go back.

Source: megatron-core, moe/token_dispatcher.py (_HybridEPManager) and fused_a2a.py; DeepEP, branch hybrid-ep; read there,
no recording. Letters: T tokens of a rank, U rows that it sends (and gets), N token copies at its experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sim.program.kernels import Collective
from sim.program.program import COMPUTE
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class FlexDispatch(Op):
    """HybridEPDispatch: x [T, H] and weights [T, E] to rows [N, H] in the order of experts and their weights [N]; before it
    all ranks' choices are gathered. Saves the map of arrived rows, int32 [U, experts of the rank], the third result."""

    node = "HybridEPDispatchBackward"
    saves_late = True
    saved_outputs = (2,)
    not_differentiable = (2,)

    @staticmethod
    def forward(
        tape: Tape, x: Tensor, weights: Tensor, chosen: Tensor, rows: int, unique: int, ranks: int
    ) -> tuple[Tensor, ...]:
        whole = tape.empty((ranks * chosen.shape[0], chosen.shape[1]), "bool")
        tape.recorder.collective(Collective("all_gather", whole.bytes, "ep", ranks, "bool"), COMPUTE)
        places = tape.pointwise("hybrid_ep_scan", (unique, weights.shape[1] // ranks), "int32", None, whole.bytes)
        del whole
        return _spread(tape, x, places, rows, ranks), tape.empty((rows,), weights.dtype), places

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (shape, _), (weights_shape, weights_dtype) = node.metas[:2]
        dx = _joined(tape, first(gradients), saved[0], shape[0], node.attributes[-1])
        return [dx, tape.empty(weights_shape, weights_dtype), None]


class FlexCombine(Op):
    """HybridEPCombine: rows [N, H] summed to [T, H]; saves the map."""

    node = "HybridEPCombineBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, places: Tensor) -> Iterable[Tensor | None]:
        return (places,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, places: Tensor, tokens: int, ranks: int) -> Tensor:
        return _joined(tape, x, places, tokens, ranks)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        rows = node.metas[0][0][0]
        return [_spread(tape, first(gradients), saved[0], rows, node.attributes[-1]), None]


def _spread(tape: Tape, x: Tensor, places: Tensor, rows: int, ranks: int) -> Tensor:
    """U rows go out and U come, each copied for every of its experts here."""
    arrived = _exchange(tape, x, places.shape[0], ranks)
    return tape.pointwise("permute_kernel", (rows, x.shape[1]), x.dtype, None, arrived.bytes + places.bytes, "copy")


def _joined(tape: Tape, x: Tensor, places: Tensor, tokens: int, ranks: int) -> Tensor:
    """The way back: sums over a token's experts here, then over the ranks."""
    shape = (places.shape[0], x.shape[1])
    own = tape.pointwise("unpermute_kernel", shape, x.dtype, None, x.bytes + places.bytes, "copy")
    arrived = _exchange(tape, own, shape[0], ranks)
    return tape.pointwise("hybrid_ep_reduce", (tokens, x.shape[1]), x.dtype, None, arrived.bytes, "copy")


def _exchange(tape: Tape, x: Tensor, rows: int, ranks: int) -> Tensor:
    arrived = tape.empty((rows, *x.shape[1:]), x.dtype)
    size_bytes = rows * prod(x.shape[1:]) * x.bytes // x.elements
    tape.recorder.collective(Collective("all_to_all", size_bytes, "ep", ranks, x.dtype), COMPUTE)
    return arrived


@rule("flex_dispatch")
def flex_dispatch(
    tape: Tape, x: Tensor, weights: Tensor, chosen: Tensor, rows: int, unique: int, ranks: int
) -> tuple[Tensor, ...]:
    return tape.apply_tuple(FlexDispatch, (x, weights, chosen), rows, unique, ranks)


@rule("flex_combine")
def flex_combine(tape: Tape, x: Tensor, places: Tensor, tokens: int, ranks: int) -> Tensor:
    return tape.apply(FlexCombine, (x, places), tokens, ranks)
