"""Ulysses: ranks that share sequences exchange tokens for heads, so that attention sees whole sequences of some heads.

Every rank sends each other one its heads of the tokens here, and gets the tokens there of its own heads; after attention
the result goes back. Letters: n ranks, S tokens of a sequence, B sequences, A heads, D head dim.
`exchange_parts` is DeepSpeed's (_DimZeroAllToAll), which blocks: sim/model/shard/ulysses.py says the rest of that code.
`HeadsAttention` is Transformer Engine's (cp-comm-type a2a): q, k and v are sent one after another, each put in order on a
stream of its own meanwhile. Source: DeepSpeed's sequence/layer.py, Transformer Engine 2.x, context_parallel.py, read
there; no recording.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.model.calls import Shape
from sim.program.kernels import Collective
from sim.program.program import COMPUTE, CONTEXT
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.fused_attention import attend, attend_back
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor

GROUP = "cp"


class ExchangeParts(Op):
    """x [n, ...]: part r goes to rank r, the parts of all ranks come back. Saves nothing."""

    node = "_DimZeroAllToAllBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor, ranks: int) -> Tensor:
        return _exchanged(tape, x, ranks)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [_exchanged(tape, first(gradients), node.attributes[0])]


def _exchanged(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    """empty_like(x).contiguous(), which copies where x is in another order; so does x.contiguous()."""
    out = tape.empty(x.shape, x.dtype, strides_like(x))
    out = out if out.strides is None else tape.copy(out)
    given = x if x.strides is None else tape.copy(x)
    tape.recorder.collective(Collective("all_to_all", given.bytes, GROUP, ranks, x.dtype), COMPUTE)
    return out


@rule("exchange_parts")
def exchange_parts(tape: Tape, x: Tensor, ranks: int) -> Tensor:
    return tape.apply(ExchangeParts, (x,), ranks)


class HeadsAttention(Op):
    """AttnFuncWithCPAndQKVOA2A over q [S/n, B, A, D]. Saves q, k, v and the result as attention sees them, [S, B, A/n, D],
    log-sum-exp and random state."""

    node = "AttnFuncWithCPAndQKVOA2ABackward"
    saves_late = True
    saved_outputs = (1, 2, 3, 4, 5, 6)
    not_differentiable = (1, 2, 3, 4, 5, 6)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor) -> Iterable[Tensor | None]:
        return ()

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, ...]:
        """out; q, k, v and the result of this rank's heads, log-sum-exp, random state."""
        q_part, k_part, v_part = _tokens_for_heads(tape, [q, k, v], ranks)
        part, lse, rng = attend(tape, q_part, k_part, causal=True, value_dim=v.shape[-1])
        (out,) = _heads_for_tokens(tape, [part], ranks)
        return out, q_part, k_part, v_part, part, lse, rng

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (ranks,) = node.attributes
        q, k = saved[:2]
        gradient = _tokens_for_heads(tape, [first(gradients)], ranks)
        parts = [*attend_back(tape, q, k, causal=True, value_dim=saved[2].shape[-1])]
        del gradient
        gradients.clear()
        return [*_heads_for_tokens(tape, parts, ranks)]


def _tokens_for_heads(tape: Tape, given: list[Tensor], ranks: int) -> list[Tensor]:
    """[S/n, B, A, D] to [S, B, A/n, D]: cut by heads (a copy), exchanged, put in the sequence's order (a copy)."""
    made: list[Tensor] = []
    for x in given:
        length, batch, heads, width = x.shape
        cut = tape.copy(x, (ranks, length, batch, heads // ranks, width))
        made.append(_sent(tape, cut, ranks, (length * ranks, batch, heads // ranks, width), "aten::index_select"))
        del cut
    tape.recorder.stream_waits_stream(COMPUTE, CONTEXT)
    return made


def _heads_for_tokens(tape: Tape, given: list[Tensor], ranks: int) -> list[Tensor]:
    """[S, B, A/n, D] to [S/n, B, A, D]: put in the order of the ranks (a copy), exchanged, joined by heads (a copy)."""
    made: list[Tensor] = []
    for x in given:
        length, batch, heads, width = x.shape
        ordered = tape.pointwise("aten::index_select", x.shape, x.dtype, None, x.bytes, "copy")
        made.append(_sent(tape, ordered, ranks, (length // ranks, batch, heads * ranks, width), "aten::copy_"))
        del ordered
    tape.recorder.stream_waits_stream(COMPUTE, CONTEXT)
    return made


def _sent(tape: Tape, x: Tensor, ranks: int, shape: Shape, copies: str) -> Tensor:
    """x exchanged behind what compute was given so far, and brought into `shape` on the same stream."""
    recorder = tape.recorder
    arrived = tape.empty(x.shape, x.dtype)
    recorder.stream_waits_stream(CONTEXT, COMPUTE)
    recorder.collective(Collective("all_to_all", x.bytes, GROUP, ranks, x.dtype), CONTEXT)
    with recorder.on_stream(CONTEXT):
        return tape.pointwise(copies, shape, x.dtype, None, arrived.bytes, "copy")
