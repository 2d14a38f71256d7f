"""torchtitan's tensor parallelism: DTensor's redistributions between layers, and the loss over a split vocabulary.

Between layers each rank has its S/t tokens of x [B, S, H]. A gather lands as [t B, S/t, H] and is put in order by a copy
(a view for one sequence); what is summed and scattered is cut and joined by a copy first. Functional collectives are
waited for where they are issued, so that they block. Source: torch 2.13, distributed/_functional_collectives.py,
tensor/placement_types.py, tensor/parallel/loss.py, read there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.tensor_parallel import block
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


def gathered(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    """All ranks' tokens: [B, S, ...] of [B, S/ranks, ...]."""
    batch, tokens, *rest = x.shape
    pieces = tape.empty((ranks * batch, tokens, *rest), x.dtype)
    block(tape, "all_gather", pieces, ranks)
    whole = (batch, ranks * tokens, *rest)
    return (
        pieces.alias(whole) if batch == 1 else tape.pointwise("aten::cat", whole, x.dtype, None, pieces.bytes, "copy")
    )


def scattered(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    """This rank's tokens of the ranks' sum: [B, S/ranks, ...] of [B, S, ...]."""
    batch, tokens, *rest = x.shape
    pieces = tape.pointwise("aten::cat", (ranks * batch, tokens // ranks, *rest), x.dtype, None, x.bytes, "copy")
    out = tape.empty((batch, tokens // ranks, *rest), x.dtype)
    block(tape, "reduce_scatter", pieces, ranks)
    return out


class GatherSequence(Op):
    """Shard(1) to Replicate; the gradient, a sum over the ranks, is scattered."""

    node = "RedistributeBackward"
    aten = "_c10d_functional.all_gather_into_tensor"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int) -> Tensor:
        return gathered(tape, x, ranks)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [scattered(tape, first(gradients), node.attributes[0])]


class ScatterSequence(Op):
    """Partial to Shard(1); the gradient is gathered."""

    node = "RedistributeBackward"
    aten = "_c10d_functional.reduce_scatter_tensor"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int) -> Tensor:
        return scattered(tape, x, ranks)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [gathered(tape, first(gradients), node.attributes[0])]


class ParallelCrossEntropy(Op):
    """loss_parallel(): log_softmax over logits [N, V/t] in fp32, whose maximum and sum the ranks agree on; then the
    targets' log probabilities, which they add up. Saves log probabilities and targets; outputs: loss, log probabilities."""

    node = "NllLossBackward0"
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def saved_inputs(node: Node, logits: Tensor, targets: Tensor) -> Iterable[Tensor | None]:
        return (targets,)

    @staticmethod
    def forward(tape: Tape, logits: Tensor, targets: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        rows, dtype = (logits.shape[0], 1), logits.dtype
        largest = tape.pointwise("aten::amax", rows, dtype, None, logits.bytes, "reduce")
        block(tape, "all_reduce", largest, ranks)
        shifted = tape.pointwise("aten::sub", logits.shape, dtype, None, logits.bytes)
        exponentials = tape.pointwise("aten::exp", logits.shape, dtype, None, shifted.bytes)
        total = tape.pointwise("aten::sum", rows, dtype, None, exponentials.bytes, "reduce")
        del exponentials
        block(tape, "all_reduce", total, ranks)
        result = tape.pointwise("aten::sub", logits.shape, dtype, None, shifted.bytes)
        del shifted, largest, total
        chosen = tape.pointwise("aten::gather", rows, dtype, None, targets.bytes)
        block(tape, "all_reduce", chosen, ranks)
        loss = tape.pointwise("aten::sum", (), dtype, None, chosen.bytes, "reduce")
        return loss, result

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        """(grad_input + exp(x)) * grad_output, written so: three buffers of that size beside the saved one."""
        result = saved[1]
        update = tape.pointwise("aten::zeros_like", result.shape, result.dtype, None, 0, "fill")
        exponentials = tape.pointwise("aten::exp", result.shape, result.dtype, None, result.bytes)
        added = tape.pointwise("aten::add", result.shape, result.dtype, None, 2 * result.bytes)
        del exponentials
        scaled = tape.pointwise("aten::mul", result.shape, result.dtype, None, result.bytes)
        del added, update
        return [scaled, None]


@rule("gather_sequence")
def gather_sequence(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    return tape.apply(GatherSequence, (x,), ranks)


@rule("scatter_sequence")
def scatter_sequence(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    return tape.apply(ScatterSequence, (x,), ranks)


@rule("parallel_cross_entropy")
def parallel_cross_entropy(tape: Tape, logits: Tensor, targets: Tensor, ranks: int) -> Tensor:
    return tape.apply_tuple(ParallelCrossEntropy, (logits, targets), ranks)[0]
