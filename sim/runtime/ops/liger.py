"""Liger-Kernel's functions for transformers' Llama-like models (liger-kernel 0.8.5, recorded on torch 2.14).

Each is one Triton kernel forward and one backward, which writes gradients over what it reads: a norm's over the incoming
gradient, SwiGLU's over the saved gate and value, rotary positions over queries, keys and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, ClassVar

from sim.program.kernels import Gemm
from sim.program.program import COMPUTE
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import autocast_to
from sim.runtime.ops.views import transposed
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

ADDS_INTO_FP32_FROM = 80
"""Compute capability from which products of 16 bit add into the weight's gradient; before it is added by a kernel."""


def tokens_per_chunk(tokens: int, hidden: int, vocab: int) -> int:
    """Tokens whose logits exist at a time: about as many bytes as the hidden states of all, a power of two."""
    share = scratch.ceil_div(tokens, scratch.ceil_div(vocab, hidden))
    return min(1 << (share - 1).bit_length(), tokens)


def _plain(tape: Tape, x: Tensor) -> Tensor:
    """ensure_contiguous."""
    return x if x.strides is None else tape.copy(x)


class LigerFusedLinearCrossEntropy(Op):
    """hidden [N, H], weight [V, H], targets [N]: the loss, and while it is computed chunk by chunk both gradients, which
    are all that is saved. Outputs: the loss, the gradient of hidden, that of the weight."""

    node = "LigerFusedLinearCrossEntropyFunctionBackward"
    saves_late = True
    saved_outputs: ClassVar[tuple[int, ...]] = (1, 2)
    not_differentiable: ClassVar[tuple[int, ...]] = (1, 2)

    @classmethod
    def forward(cls, tape: Tape, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        recorder, (tokens, width), vocab = tape.recorder, hidden.shape, weight.shape[0]
        of_hidden = tape.pointwise("aten::zeros_like", hidden.shape, hidden.dtype, None, 0, "fill")
        of_weight = None
        if cls.saved_outputs == (1, 2):
            of_weight = tape.pointwise("aten::zeros_like", weight.shape, weight.dtype, None, 0, "fill")
        losses = tape.pointwise("aten::zeros", (tokens,), "fp32", None, 0, "fill")
        mask = _count(tape, targets)
        chunk = tokens_per_chunk(tokens, width, vocab)
        storage = None if tape.autocast_dtype else tape.empty((chunk, vocab), hidden.dtype)
        for start in range(0, tokens, chunk):
            _chunk(tape, hidden, weight, of_weight, min(chunk, tokens - start), storage)
        del storage
        loss = tape.empty((), "fp32")
        tape.scratch(*scratch.norm_buffers(tape.device, tokens))
        recorder.memory_bound("aten::sum", "reduce", losses.bytes)
        del mask, losses
        return (loss, of_hidden) if of_weight is None else (loss, of_hidden, of_weight)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        """Is the loss's own gradient one? (It is: nothing is scaled.) The host reads the answer."""
        one = tape.empty((), "fp32")
        equal, answer = tape.empty((), "bool"), tape.empty((), "bool")
        tape.recorder.memory_bound("aten::eq", "elementwise", 2 * one.bytes)
        tape.recorder.sync(tape.recorder.record(COMPUTE))
        del answer, equal, one
        return [saved[0], saved[1] if len(saved) > 1 else None, None]


class LigerFrozenHead(LigerFusedLinearCrossEntropy):
    """The same where the weight is not trained."""

    saved_outputs = (1,)
    not_differentiable = (1,)


def _count(tape: Tape, targets: Tensor) -> Tensor:
    """How many targets count: read on the host. Returns the mask."""
    mask = tape.pointwise("aten::ne", targets.shape, "bool", None, targets.bytes)
    count = tape.empty((), "int64")
    numbers = tape.cast_copy(mask, "int64")
    tape.recorder.memory_bound("aten::sum", "reduce", numbers.bytes)
    del numbers
    tape.recorder.sync(tape.recorder.record(COMPUTE))
    del count
    return mask


def _chunk(
    tape: Tape, hidden: Tensor, weight: Tensor, of_weight: Tensor | None, rows: int, storage: Tensor | None
) -> None:
    """Logits of `rows` tokens, their gradient in their place, and what it adds to both gradients. Without `storage` for
    the logits (under autocast) products make their own results; the cast of the transposed weight is made every time,
    that of the weight itself (a leaf that is trained) once."""
    recorder, (vocab, width), dtype = tape.recorder, weight.shape, tape.autocast_dtype or hidden.dtype
    part = hidden.alias((rows, width))
    if storage is None:
        turned = tape.cast_copy(weight, dtype) if weight.dtype != dtype else None
        cast = tape.cast_copy(part, dtype) if part.dtype != dtype else None
        logits = tape.matmul_out("aten::mm", rows, vocab, width, dtype)
        del cast, turned
    else:
        logits = tape.matmul_out("aten::mm", rows, vocab, width, dtype, out=storage.alias((rows, vocab)))
    recorder.memory_bound("liger_cross_entropy_kernel", "cross_entropy", 3 * logits.bytes)
    recorder.memory_bound("aten::copy_", "copy", 2 * 4 * rows)
    if storage is None:
        kept = autocast_to(tape, weight, dtype)
        made = tape.matmul_out("aten::mm", rows, width, vocab, dtype)
        recorder.memory_bound("aten::copy_", "copy", made.bytes + part.bytes)
        del made, kept
    else:
        tape.matmul_out("aten::mm", rows, width, vocab, dtype, out=part)
    if of_weight is None:
        return
    if dtype != "fp32" and tape.device.compute_capability >= ADDS_INTO_FP32_FROM:
        cast = tape.cast_copy(part, dtype) if part.dtype != dtype else None
        recorder.launch("aten::addmm", Gemm(vocab, width, rows, dtype, accumulate=True))
        del cast
        return
    product = tape.matmul_out("aten::mm", vocab, width, rows, dtype)
    wide = tape.cast_copy(product, "fp32") if dtype != "fp32" else product
    recorder.memory_bound("aten::add_", "elementwise", 2 * of_weight.bytes + wide.bytes)


class LigerRmsNorm(Op):
    """y, reciprocal deviation in fp32. Saves x, weight and that. Backward: the input's gradient over the incoming one; a row
    of the weight's per multiprocessor in fp32, summed."""

    node = "LigerRMSNormFunctionBackward"
    saves_late = True
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weight: Tensor) -> Iterable[Tensor | None]:
        return (x, weight)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = tape.empty(x.shape, x.dtype)
        deviation = tape.empty((prod(x.shape[:-1]),), "fp32")
        tape.recorder.memory_bound("_rms_norm_forward_kernel", "persistent_norm_forward", x.bytes + y.bytes)
        return y, deviation

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, (width,) = _plain(tape, first(gradients)), node.metas[1][0]
        rows = tape.empty((tape.device.sms, width), "fp32") if node.needs(1) else None
        tape.recorder.memory_bound("_rms_norm_backward_kernel", "persistent_norm_backward", 3 * gradient.bytes)
        of_weight = None
        if rows is not None:
            of_weight = tape.sum_to(rows, (width,))
            if node.metas[1][1] != "fp32":
                of_weight = tape.cast_copy(of_weight, node.metas[1][1])
        return [gradient.alias(gradient.shape), of_weight]


class LigerSwiGlu(Op):
    """silu(gate) * value. Saves both; backward writes their gradients over them."""

    node = "LigerSiLUMulFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, gate: Tensor, value: Tensor) -> Iterable[Tensor | None]:
        return (gate, value)

    @staticmethod
    def forward(tape: Tape, gate: Tensor, value: Tensor) -> Tensor:
        return tape.pointwise("_swiglu_forward_kernel", gate.shape, gate.dtype, None, 2 * gate.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, (gate, value) = _plain(tape, first(gradients)), saved
        tape.recorder.memory_bound("_swiglu_backward_kernel", "elementwise", 5 * gradient.bytes)
        return [gate.alias(gate.shape), value.alias(value.shape)]


class LigerRope(Op):
    """q, k [B, heads, S, D], tokens before heads in memory, rotated where they are; backward likewise. Saves cos and sin."""

    node = "LigerRopeFunctionBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Iterable[Tensor | None]:
        return (cos, sin)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return _rotate(tape, q, k)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        q, k = gradients
        assert q is not None and k is not None
        return [*_rotate(tape, q, k), None, None]


def _rotate(tape: Tape, *several: Tensor) -> tuple[Tensor, ...]:
    """Copies come first where memory is in another order."""
    tokens_first = [_plain(tape, transposed(x, 1, 2)) for x in several]
    tape.recorder.memory_bound("_triton_rope", "elementwise", 2 * sum(x.bytes for x in several))
    return tuple(transposed(x, 1, 2) for x in tokens_first)


@rule("liger_linear_cross_entropy")
def liger_linear_cross_entropy(tape: Tape, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    op = LigerFusedLinearCrossEntropy if weight.requires_grad else LigerFrozenHead
    return tape.apply_tuple(op, (hidden, weight, targets))[0]


@rule("liger_rms_norm")
def liger_rms_norm(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    return tape.apply_tuple(LigerRmsNorm, (x, weight))[0]


@rule("liger_swiglu")
def liger_swiglu(tape: Tape, gate: Tensor, value: Tensor) -> Tensor:
    return tape.apply(LigerSwiGlu, (gate, value))


@rule("liger_rope")
def liger_rope(tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return tape.apply_tuple(LigerRope, (q, k, cos, sin))
