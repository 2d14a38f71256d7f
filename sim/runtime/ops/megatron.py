"""Megatron-core's own autograd functions. On one rank recorded with megatron-core 0.16.1 over torch 2.14; what is fused,
and what ranks do together, is read in its source.

A function written in Python holds its incoming gradient no longer than its backward runs: `gradients.clear()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod
from typing import Any

from sim.program.kernels import Gemm
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.tensor_parallel import block, finish, some_tokens, start, whole_tokens
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.runtime.weight_store import PutOff


def _seen_as(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """_unsafe_view: another handle on the bytes that takes the place of x."""
    return Tensor(x.storage, shape, x.dtype)


def _gathered(tape: Tape, shape: tuple[int, ...], dtype: str) -> Tensor:
    """The tokens of all ranks lie in the global buffer, where attention has its scores too."""
    return tape.global_buffer(prod(shape), dtype).alias(shape)


class ParallelLinear(Op):
    """LinearWithGradAccumulationAndAsyncCommunication: saves x and weight; dx, dW, then the bias' sum.

    A column-parallel layer (ranks > 1) sums dx over the ranks while dW is computed. With sequence parallelism x holds
    S/ranks tokens, gathered into a global buffer: before the product, and again in backward beside the product for dx.
    `overlaps` False: dx is summed after dW, and compute waits (_CopyToModelParallelRegion before it).
    Where gradients are accumulated in fp32 (`Tape.main_gradients`), the product for dW adds to the main gradient.
    A split backward puts dW off (`Tape.weight_store`). Beside a frozen weight x is not saved (LinearWithFrozenWeight).
    """

    node = "LinearWithGradAccumulationAndAsyncCommunicationBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor, *rest: Any) -> Iterable[Tensor | None]:
        return (x if weight.requires_grad else None, weight)

    @staticmethod
    def forward(
        tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, gathers_tokens: bool, overlaps: bool
    ) -> Tensor:
        shape, (n, k) = x.shape, weight.shape
        if ranks > 1 and gathers_tokens:
            shape = whole_tokens(shape, ranks)
            block(tape, "all_gather", _gathered(tape, shape, x.dtype), ranks)
        rows = prod(shape[:-1])
        product = tape.dispatch("aten.mm", lambda: tape.matmul_out("aten::mm", rows, n, k, x.dtype))
        out = _seen_as(product, (*shape[:-1], n))
        del product
        if bias is not None:
            out = tape.pointwise("aten::add", out.shape, out.dtype, None, out.bytes + bias.bytes)
        return out

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, (x, weight), (ranks, gathers_tokens, overlaps) = first(gradients), saved, node.attributes
        gathers_tokens, shape, (n, k) = gathers_tokens and ranks > 1, node.metas[0][0], weight.shape
        if gathers_tokens:
            shape = whole_tokens(shape, ranks)
        dtype, now = gradient.dtype, tape.weight_store is None
        result: Gradients = [None, None, None]
        gathered = reduced = None
        if gathers_tokens and now and node.needs(1):
            gathered = start(tape, "all_gather", _gathered(tape, shape, dtype), ranks)
        dx = result[0] = _seen_as(tape.matmul_out("aten::mm", prod(shape[:-1]), k, n, dtype), shape)
        if gathered is not None:
            finish(tape, gathered)
        if gathers_tokens:
            result[0] = tape.empty(some_tokens(shape, ranks), dtype)
            reduced = start(tape, "reduce_scatter", dx, ranks)
        elif ranks > 1 and overlaps:
            reduced = start(tape, "all_reduce", dx, ranks)
        if now and node.needs(1):
            result[1] = _weight_gradient(tape, gradient, weight)
        elif tape.weight_store is not None and node.edges[1] is not None:
            later = partial(_gathered_weight_gradient, tape, x, gradient, weight, ranks if gathers_tokens else 1)
            tape.weight_store.append(PutOff(node.base, node.op.number, later, node.edges[1][0]))
        if node.needs(2):
            result[2] = tape.sum_to(gradient, (n,))
        if reduced is not None:
            finish(tape, reduced)
        elif ranks > 1:
            block(tape, "all_reduce", dx, ranks)
        gradients.clear()
        return result


def _weight_gradient(tape: Tape, gradient: Tensor, weight: Tensor) -> Tensor | None:
    """dW; None where the product adds to the main gradient itself."""
    (n, k), rows = weight.shape, prod(gradient.shape[:-1])
    if tape.main_gradients is not None and tape.main_gradients.takes(weight):
        work = Gemm(n, k, rows, gradient.dtype, accumulate=True, over_rows=True)
        tape.recorder.launch("wgrad_gemm_accum_fp32", work)
        return None
    return tape.matmul_out("aten::mm", n, k, rows, gradient.dtype, over_rows=True)


def _gathered_weight_gradient(tape: Tape, x: Tensor, gradient: Tensor, weight: Tensor, ranks: int) -> Tensor | None:
    """dW in a second pass; x, of which the rank has 1 / ranks of the tokens, is gathered for it."""
    if ranks > 1:
        shape = whole_tokens(x.shape, ranks)
        finish(tape, start(tape, "all_gather", _gathered(tape, shape, gradient.dtype), ranks))
    return _weight_gradient(tape, gradient, weight)


class BiasGelu(Op):
    """GeLUFunction over jitted kernels: saves x and bias; one kernel backward, whose result is the bias' before its sum.
    (megatron/core/fusions/fused_bias_gelu.py)"""

    node = "GeLUFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, bias: Tensor) -> Iterable[Tensor | None]:
        return (x, bias)

    @staticmethod
    def forward(tape: Tape, x: Tensor, bias: Tensor) -> Tensor:
        return tape.pointwise("bias_gelu", x.shape, x.dtype, None, x.bytes + bias.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        x = saved[0]
        dx = tape.pointwise("bias_gelu_back", x.shape, x.dtype, None, 2 * x.bytes)
        gradients.clear()
        return [dx, dx.detach() if node.needs(1) else None]


class BiasDropoutAdd(Op):
    """bias_dropout_add_fused_train: one kernel, saves the mask; backward one kernel, the residual's gradient passes on.
    (megatron/core/fusions/fused_bias_dropout.py)"""

    node = "BiasDropoutAddFusedTrainBackward"
    saves_late = True
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> tuple[Tensor, ...]:
        mask = tape.empty(x.shape if p else (0,), "bool")
        moved = x.bytes + residual.bytes + mask.bytes + (bias.bytes if bias is not None else 0)
        return tape.pointwise("bias_dropout_add", x.shape, residual.dtype, None, moved, "dropout"), mask

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, mask = first(gradients), saved[0]
        dx = gradient
        if mask.elements:
            moved = gradient.bytes + mask.bytes
            dx = tape.pointwise("bias_dropout_add_backward", gradient.shape, gradient.dtype, None, moved, "dropout")
        return [
            dx.detach() if dx is gradient else dx,
            dx.detach() if node.needs(1) else None,
            gradient if node.needs(2) else None,
        ]


class CausalSoftmax(Op):
    """ScaledUpperTriangMaskedSoftmax: one kernel, saves its result; the gradient is overwritten in place."""

    node = "ScaledUpperTriangMaskedSoftmaxBackward"
    saves_late = True
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, scores: Tensor) -> Tensor:
        return tape.pointwise(
            "scaled_upper_triang_masked_softmax", scores.shape, scores.dtype, None, scores.bytes, "fused_softmax"
        )

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        name = "scaled_upper_triang_masked_softmax_backward"
        tape.recorder.memory_bound(name, "fused_softmax", 2 * gradient.bytes + saved[0].bytes)
        gradients.clear()
        return [gradient]


@rule("parallel_linear")
def parallel_linear(
    tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, gathers_tokens: bool, overlaps: bool
) -> Tensor:
    return tape.apply(ParallelLinear, (x, weight, bias), ranks, gathers_tokens, overlaps)


@rule("bias_gelu")
def bias_gelu(tape: Tape, x: Tensor, bias: Tensor) -> Tensor:
    return tape.apply(BiasGelu, (x, bias))


@rule("bias_dropout_add")
def bias_dropout_add(tape: Tape, x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    return tape.apply_tuple(BiasDropoutAdd, (x, bias, residual), p)[0]


@rule("causal_softmax")
def causal_softmax(tape: Tape, scores: Tensor) -> Tensor:
    return tape.apply(CausalSoftmax, (scores,))
