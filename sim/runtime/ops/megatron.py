"""Megatron-core's own autograd functions on one rank. Recorded with megatron-core 0.16.1 over torch 2.14.

A function written in Python holds its incoming gradient no longer than its backward runs: `gradients.clear()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import to
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


def _seen_as(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """_unsafe_view: another handle on the bytes that takes the place of x."""
    return Tensor(x.storage, shape, x.dtype)


class ParallelLinear(Op):
    """LinearWithGradAccumulationAndAsyncCommunication without fusion: saves x and weight; dx, dW, then the bias' sum."""

    node = "LinearWithGradAccumulationAndAsyncCommunicationBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterable[Tensor | None]:
        return (x, weight)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, (n, k) = prod(x.shape[:-1]), weight.shape
        product = tape.dispatch("aten.mm", lambda: tape.matmul_out("aten::mm", rows, n, k, x.dtype))
        out = _seen_as(product, (*x.shape[:-1], n))
        del product
        if bias is not None:
            out = tape.pointwise("aten::add", out.shape, out.dtype, None, out.bytes + bias.bytes)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, weight = first(gradients), saved[1]
        shape, (n, k) = node.metas[0][0], weight.shape
        rows, dtype = prod(shape[:-1]), gradient.dtype
        dx = _seen_as(tape.matmul_out("aten::mm", rows, k, n, dtype), shape)
        result: Gradients = [dx, tape.matmul_out("aten::mm", n, k, rows, dtype), None]
        if node.needs(2):
            result[2] = tape.sum_to(gradient, (n,))
        gradients.clear()
        return result


class CausalSoftmax(Op):
    """ScaledUpperTriangMaskedSoftmax: one kernel, saves its result; the gradient is overwritten in place."""

    node = "ScaledUpperTriangMaskedSoftmaxBackward"
    saves_late = True
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, scores: Tensor) -> Tensor:
        return tape.pointwise(
            "scaled_upper_triang_masked_softmax", scores.shape, scores.dtype, None, scores.bytes, "softmax"
        )

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        name = "scaled_upper_triang_masked_softmax_backward"
        tape.recorder.memory_bound(name, "softmax", 2 * gradient.bytes + saved[0].bytes)
        gradients.clear()
        return [gradient]


class VocabParallelCrossEntropy(Op):
    """Loss per token. The fp32 copy of the logits becomes their softmax in place, and the gradient in backward.

    Outputs: the loss; then what is saved: softmax, mask of targets outside the vocabulary, targets.
    """

    node = "_VocabParallelCrossEntropyBackward"
    saves_late = True
    saved_outputs = (1, 2, 3)
    not_differentiable = (1, 2, 3)

    @staticmethod
    def forward(tape: Tape, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        tokens, each = targets.shape, (targets.elements,)
        softmax = to(tape, logits, "fp32")
        largest = tape.pointwise("aten::max", tokens, "fp32", None, softmax.bytes, "reduce")
        tape.empty(tokens, "int64")  # and where it is
        tape.recorder.memory_bound("aten::sub_", "elementwise", 2 * softmax.bytes)
        mask = _outside_vocabulary(tape, targets)
        clone = tape.copy(targets)
        kept = tape.pointwise("aten::sub", each, "int64", None, clone.bytes)
        del clone
        sums = _exponential_sums(tape, softmax, tokens)
        predicted = sums[0]
        logarithm = tape.pointwise("aten::log", tokens, "fp32", None, sums[1].bytes)
        loss = tape.pointwise("aten::sub", tokens, "fp32", None, logarithm.bytes + predicted.bytes)
        tape.recorder.memory_bound("aten::div_", "elementwise", 2 * softmax.bytes)
        del logarithm, predicted, sums, largest
        return loss, softmax, mask, kept

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        softmax, mask, targets = saved
        each = targets.shape
        positions = tape.pointwise("aten::arange", each, "int64", None, 0)
        inside = tape.cast_copy(mask, "fp32")
        update = tape.pointwise("aten::rsub", each, "fp32", None, inside.bytes)
        del inside
        chosen = tape.pointwise("aten::index", each, "fp32", None, positions.bytes + targets.bytes)
        tape.recorder.memory_bound("aten::index_put_", "elementwise", 2 * (chosen.bytes + update.bytes))
        tape.recorder.memory_bound("aten::mul_", "elementwise", 2 * softmax.bytes)
        gradients.clear()
        return [softmax, None]


def _outside_vocabulary(tape: Tape, targets: Tensor) -> Tensor:
    below = tape.pointwise("aten::lt", targets.shape, "bool", None, targets.bytes)
    above = tape.pointwise("aten::ge", targets.shape, "bool", None, targets.bytes)
    return tape.pointwise("aten::bitwise_or", targets.shape, "bool", None, below.bytes + above.bytes)


def _exponential_sums(tape: Tape, logits: Tensor, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits at the targets, and the sums of exponentials; the exponentials replace the logits."""
    each = (prod(tokens),)
    positions = tape.pointwise("aten::arange", each, "int64", None, 0)
    predicted = tape.pointwise("aten::index", each, "fp32", None, 2 * positions.bytes)
    predicted = tape.copy(predicted)
    tape.recorder.memory_bound("aten::exp", "elementwise", 2 * logits.bytes)
    sums = tape.pointwise("aten::sum", tokens, "fp32", None, logits.bytes, "reduce")
    del positions
    return predicted, sums


@rule("parallel_linear")
def parallel_linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = tape.apply(ParallelLinear, (x, weight, bias))
    return result


@rule("causal_softmax")
def causal_softmax(tape: Tape, scores: Tensor) -> Tensor:
    result: Tensor = tape.apply(CausalSoftmax, (scores,))
    return result


@rule("vocab_parallel_cross_entropy")
def vocab_parallel_cross_entropy(tape: Tape, logits: Tensor, targets: Tensor) -> Tensor:
    result: Tensor = tape.apply_tuple(VocabParallelCrossEntropy, (logits, targets))[0]
    return result
