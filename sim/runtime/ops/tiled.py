"""Long sequences tile by tile: a function of tokens (DeepSpeed's TiledMLP), and the head with its loss (Liger's kernel).

Both keep what they are given and nothing of what is between. A tiled function runs again in backward, tile by tile, each
with a backward of its own that adds to the parameters' gradients; hooks on those wait for the last tile. The fused head
makes its gradients in forward. Source: DeepSpeed 0.19, runtime/sequence_parallel/ulysses_sp.py, and Liger-Kernel 0.6,
ops/fused_linear_cross_entropy.py, read there; no recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, prod
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.cat import Cat
from sim.runtime.ops.views import reshaped
from sim.runtime.reentrant import backward_inside, recomputing
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

Function = Callable[[Tensor], Tensor]


class Tiled(Op):
    """x [B, S, H] in tiles of tokens: saves x."""

    node = "TiledMLPBackward"
    saves_late = True

    @staticmethod
    def saved_inputs(node: Node, x: Tensor) -> Iterable[Tensor | None]:
        return (x,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, function: Function, tiles: int) -> Tensor:
        with tape.grad_mode(False):
            batch, _, width = x.shape
            parts = [function(x.alias((batch, rows, width), x.strides)) for rows in _rows(x.shape[1], tiles)]
            return Cat.forward(tape, *parts, 1)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        function, tiles = node.attributes
        width = saved[0].shape[-1]
        x = reshaped(tape, saved[0], (prod(saved[0].shape[:-1]), width))
        incoming = reshaped(tape, first(gradients), x.shape)
        total = tape.pointwise("aten::zeros_like", x.shape, x.dtype, None, 0, "fill")
        counts = _rows(x.shape[0], tiles)
        for number, rows in enumerate(counts):
            tape.gradients_are_whole = number == len(counts) - 1
            tile = x.alias((rows, width))
            tile.requires_grad = node.needs(0)
            tile.grad = total.alias(tile.shape)  # its part of the gradient, which is added to
            with recomputing(tape):
                output = function(tile)
            backward_inside(tape, [tile], output, [incoming.alias(tile.shape)])
        gradients.clear()
        return [total.alias(saved[0].shape)]


def _rows(length: int, tiles: int) -> list[int]:
    """torch.chunk: equal parts, the last may be shorter."""
    most = ceil(length / tiles)
    return [min(most, length - begin) for begin in range(0, length, most)]


class FusedHead(Op):
    """x [N, H] times weight [V, H] transposed and the loss at N targets, chunk by chunk, of as many tokens that a chunk's
    logits are about as large as x. Saves the gradients, which backward hands over after it has read that its own is 1."""

    node = "LigerFusedLinearCrossEntropyFunctionBackward"
    saves_late = True
    saved_outputs = (1, 2)
    not_differentiable = (1, 2)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        (tokens, hidden), vocab = x.shape, weight.shape[0]
        dx = tape.pointwise("aten::zeros_like", x.shape, x.dtype, None, 0, "fill")
        dw = tape.pointwise("aten::zeros_like", weight.shape, weight.dtype, None, 0, "fill")
        losses = tape.pointwise("aten::zeros", (tokens,), "fp32", None, 0, "fill")
        chunk = chunk_of(tokens, hidden, vocab)
        for begin in range(0, tokens, chunk):
            rows = min(chunk, tokens - begin)
            logits = tape.matmul_out("aten::mm", rows, vocab, hidden, x.dtype)
            tape.recorder.memory_bound("liger_cross_entropy_kernel", "cross_entropy", 3 * logits.bytes)
            tape.matmul_out("aten::mm", rows, hidden, vocab, x.dtype, out=dx)
            made = tape.matmul_out("aten::mm", vocab, hidden, rows, x.dtype)
            tape.recorder.memory_bound("aten::add_", "elementwise", 3 * made.bytes)
            del logits, made
        loss = tape.pointwise("aten::sum", (), "fp32", None, losses.bytes, "reduce")
        return loss, dx, dw

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        tape.rules["read_on_host"](tape)
        return [saved[0], saved[1], None]


def chunk_of(tokens: int, hidden: int, vocab: int) -> int:
    """Tokens of a chunk: a power of two from N H / V on."""
    wanted = ceil(tokens / ceil(vocab / hidden))
    return 1 << (wanted - 1).bit_length()


@rule("tiled")
def tiled(tape: Tape, function: Function, x: Tensor, tiles: int) -> Tensor:
    return tape.apply(Tiled, (x,), function, tiles)


@rule("fused_head")
def fused_head(tape: Tape, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return tape.apply_tuple(FusedHead, (x, weight, targets))[0]
