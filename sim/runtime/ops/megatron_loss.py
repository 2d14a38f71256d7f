"""Megatron's losses per token, over a vocabulary that is split over ranks or not: op by op, or in fused kernels.

Code: megatron-core 0.16 (tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py), Transformer Engine
(triton/cross_entropy.py). Functions written in Python: `gradients.clear()` as in `megatron`.
"""

from __future__ import annotations

from math import prod
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import to
from sim.runtime.ops.tensor_parallel import block, outside_shard
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class VocabParallelCrossEntropy(Op):
    """Loss per token. The fp32 copy of the logits becomes their softmax in place, and the gradient in backward.

    With the vocabulary split over ranks they agree on maximum, logit of the target and sum by three all-reduces.

    Outputs: the loss; then what is saved: softmax, mask of targets outside the vocabulary, targets.
    """

    node = "_VocabParallelCrossEntropyBackward"
    saves_late = True
    saved_outputs = (1, 2, 3)
    not_differentiable = (1, 2, 3)

    @staticmethod
    def forward(tape: Tape, logits: Tensor, targets: Tensor, ranks: int) -> tuple[Tensor, ...]:
        tokens, each = targets.shape, (targets.elements,)
        softmax = to(tape, logits, "fp32")
        largest = tape.pointwise("aten::max", tokens, "fp32", None, softmax.bytes, "reduce")
        tape.empty(tokens, "int64")  # and where it is
        if ranks > 1:
            block(tape, "all_reduce", largest, ranks)
        tape.recorder.memory_bound("aten::sub_", "elementwise", 2 * softmax.bytes)
        mask = outside_shard(tape, targets)
        clone = tape.copy(targets)
        kept = tape.pointwise("aten::sub", each, "int64", None, clone.bytes)
        del clone
        sums = _exponential_sums(tape, softmax, tokens)
        predicted = sums[0]
        if ranks > 1:
            block(tape, "all_reduce", predicted, ranks)
            block(tape, "all_reduce", sums[1], ranks)
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


class CompiledCrossEntropy(Op):
    """`native` fusion: the same in regions that torch.compile makes (jit_fuser), as Inductor cuts them.

    Forward in place like the above, in three passes and with two all-reduces; backward copies the softmax, since indexed
    entries change, and writes the gradient in bf16 beside both (read in the code that Inductor of torch 2.13 generates).
    """

    node = "_VocabParallelCrossEntropyBackward"
    saves_late = True
    saved_outputs = (1, 2, 3)
    not_differentiable = (1, 2, 3)

    @staticmethod
    def forward(tape: Tape, logits: Tensor, targets: Tensor, ranks: int) -> tuple[Tensor, ...]:
        tokens, each = targets.shape, (targets.elements,)
        softmax = tape.pointwise("fused_max", logits.shape, "fp32", None, logits.bytes, "reduce")
        largest = tape.empty(tokens, "fp32")
        if ranks > 1:
            block(tape, "all_reduce", largest, ranks)
        mask, kept = tape.empty(tokens, "bool"), tape.empty(each, "int64")
        picked = tape.empty(each, "fp32")
        sums = tape.empty((2 * tokens[0], *tokens[1:]), "fp32")  # logits of the targets and sums of exponentials
        tape.recorder.memory_bound("fused_exp_sum", "reduce", 2 * softmax.bytes)
        del picked
        if ranks > 1:
            block(tape, "all_reduce", sums, ranks)
        loss = tape.empty(tokens, "fp32")
        tape.recorder.memory_bound("fused_div_log", "elementwise", 2 * softmax.bytes)
        del largest, sums
        return loss, softmax, mask, kept

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        softmax, _, targets = saved
        copied = tape.pointwise("fused_copy", softmax.shape, "fp32", None, softmax.bytes, "copy")
        tape.recorder.memory_bound("fused_index_put", "elementwise", 4 * targets.bytes)
        out = tape.pointwise("fused_mul", softmax.shape, "bf16", None, copied.bytes + softmax.bytes)
        del copied
        gradients.clear()
        return [out, None]


class TritonCrossEntropy(Op):
    """`te` fusion: Transformer Engine's Triton kernels. The gradient takes the place of the logits already in forward;
    backward scales it by the incoming one. Ranks gather maximum, sum and target's logit of each token."""

    node = "CrossEntropyFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, logits: Tensor, targets: Tensor) -> tuple[Tensor | None, ...]:
        return (logits,)

    @staticmethod
    def forward(tape: Tape, logits: Tensor, targets: Tensor, ranks: int) -> Tensor:
        tokens, rows = targets.shape, targets.elements
        loss = tape.pointwise("aten::zeros", tokens, "fp32", None, 0, "fill")
        sums = tape.pointwise("aten::zeros", (3 * rows,), "fp32", None, 0, "fill")
        tape.recorder.memory_bound("online_softmax_kernel", "reduce", logits.bytes + sums.bytes)
        gathered = sums
        if ranks > 1:
            gathered = tape.pointwise("aten::zeros", (3 * rows * ranks,), "fp32", None, 0, "fill")
            block(tape, "all_gather", gathered, ranks)
        tape.recorder.memory_bound("cross_entropy_kernel", "elementwise", 2 * logits.bytes + gathered.bytes)
        return loss

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        logits = saved[0]
        tape.recorder.memory_bound("element_mul_kernel", "elementwise", 2 * logits.bytes + first(gradients).bytes)
        gradients.clear()
        return [logits, None]


@rule("vocab_parallel_cross_entropy")
def vocab_parallel_cross_entropy(tape: Tape, logits: Tensor, targets: Tensor, ranks: int, fusion: str) -> Tensor:
    if fusion == "te":
        return tape.apply(TritonCrossEntropy, (logits, targets), ranks)
    kind = CompiledCrossEntropy if fusion == "native" else VocabParallelCrossEntropy
    return tape.apply_tuple(kind, (logits, targets), ranks)[0]
