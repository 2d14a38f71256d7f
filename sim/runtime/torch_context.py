"""torch's context_parallel(buffers=[tokens, targets, rope cache]): each is cut to this rank's part, for a while.

Indices that balance the load are made anew at every entry; shards live until the exit beside the buffers, whose own bytes
stay; the rope cache is cloned so that it can be restored. Recorded with torch 2.14 (tests/exact/recordings/context).
"""

from __future__ import annotations

from typing import Protocol

from sim.model.calls import Tensor as ModelTensor
from sim.model.language_model import LanguageModel
from sim.model.shard.context import ContextParallel
from sim.program.program import Owner, Phase
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class Script(Protocol):
    """The training script's variables."""

    tokens: ModelTensor | None
    targets: ModelTensor | None
    model: LanguageModel


class TorchContext:
    """Around forward and backward of a micro-batch. The script has loaded whole sequences."""

    def __init__(self, tape: Tape, context: ContextParallel) -> None:
        self.tape = tape
        self.context = context
        self._held: list[Tensor | None] = []
        self._rope: Tensor | None = None

    def enter(self, script: Script) -> None:
        """tokens and targets [B, S] and the rope cache [S, ...] become this rank's parts."""
        tape, ranks = self.tape, self.context.degree
        given = (script.tokens, script.targets, vars(script.model)["rope"])
        tokens, targets, rope = (Tensor.of(x) for x in given if x is not None)
        with tape.phase(Phase.DATA, Owner.OTHER):
            clone = tape.pointwise("aten::clone", rope.shape, rope.dtype, None, rope.bytes, "copy")
            indices = _balanced(tape, tokens.shape[1], ranks)
            shards = [
                _shard(tape, tokens, 1, ranks, "aten::gather"),
                _shard(tape, targets, 1, ranks, "aten::gather"),
                _shard(tape, rope, 0, ranks, "aten::index_select"),
            ]
            del indices
            last: Tensor | None = None
            for shard in shards:
                last = None
                last = tape.pointwise("aten::clone", shard.shape, shard.dtype, None, shard.bytes, "copy")
                tape.recorder.memory_bound("aten::copy_", "copy", 2 * shard.bytes)
        self._held, self._rope = [clone, *shards, last], rope
        script.tokens, script.targets, vars(script.model)["rope"] = (
            Tensor(buffer.storage, shard.shape, buffer.dtype) for buffer, shard in zip((tokens, targets, rope), shards)
        )
        tape.context = self.context

    def leave(self, script: Script) -> None:
        """The rope cache is restored."""
        rope = self._rope
        assert rope is not None
        with self.tape.phase(Phase.DATA, Owner.OTHER):
            self.tape.recorder.memory_bound("aten::copy_", "copy", 2 * rope.bytes)
            self._held.clear()
        vars(script.model)["rope"], self._rope, self.tape.context = rope, None, None


def _balanced(tape: Tape, length: int, ranks: int) -> Tensor:
    """_HeadTailLoadBalancer._generate_indices: int32 [S]."""
    indices = tape.pointwise("aten::arange", (length,), "int32", None, 0)
    heads = tape.pointwise("aten::arange", (ranks,), "int64", None, 0)
    tails = tape.pointwise("aten::rsub", (ranks,), "int64", None, heads.bytes)
    parts = [tape.pointwise("aten::index", (length // 2,), "int32", None, indices.bytes) for _ in range(2)]
    paired = tape.pointwise("aten::cat", (length,), "int32", None, indices.bytes, "copy")
    del parts, tails
    return paired


def _shard(tape: Tape, buffer: Tensor, dim: int, ranks: int, name: str) -> Tensor:
    """Brought into the balanced order, then this rank's part of it, copied."""
    ordered = tape.pointwise(name, buffer.shape, buffer.dtype, None, buffer.bytes, "copy")
    shape = tuple(size // ranks if d == dim else size for d, size in enumerate(ordered.shape))
    return tape.pointwise("aten::clone", shape, buffer.dtype, None, ordered.bytes // ranks, "copy")
