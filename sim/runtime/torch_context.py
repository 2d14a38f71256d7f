"""torch's context_parallel(buffers=[tokens, targets, rope caches]): each is cut to this rank's part, for a while.

Indices that balance the load are made anew at every entry; shards live until the exit beside the buffers, whose own bytes
stay; rope caches are cloned so that they can be restored. Recorded with torch 2.14 (tests/exact/recordings/context);
with pipeline stages torchtitan enters once per step, with all micro-batches and every stage's cache, read there.
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
    models: list[LanguageModel]


class TorchContext:
    """Around forward and backward of what the script has loaded: whole sequences."""

    def __init__(self, tape: Tape, context: ContextParallel) -> None:
        self.tape = tape
        self.context = context
        self._held: list[Tensor | None] = []
        self._ropes: list[Tensor] = []

    def enter(self, script: Script) -> None:
        """tokens and targets [B, S] and the models' rope caches [S, ...] become this rank's parts."""
        tape, ranks = self.tape, self.context.degree
        given = (script.tokens, script.targets, *(vars(model)["rope"] for model in script.models))
        tokens, targets, *ropes = (Tensor.of(x) for x in given if x is not None)
        with tape.phase(Phase.DATA, Owner.OTHER):
            clones = [tape.pointwise("aten::clone", x.shape, x.dtype, None, x.bytes, "copy") for x in ropes]
            indices = _balanced(tape, tokens.shape[1], ranks)
            shards = [
                _shard(tape, tokens, 1, ranks, "aten::gather"),
                _shard(tape, targets, 1, ranks, "aten::gather"),
                *(_shard(tape, rope, 0, ranks, "aten::index_select") for rope in ropes),
            ]
            del indices
            last: Tensor | None = None
            for shard in shards:
                last = None
                last = tape.pointwise("aten::clone", shard.shape, shard.dtype, None, shard.bytes, "copy")
                tape.recorder.memory_bound("aten::copy_", "copy", 2 * shard.bytes)
        self._held, self._ropes = [*clones, *shards, last], ropes
        script.tokens, script.targets, *cut = (
            Tensor(buffer.storage, shard.shape, buffer.dtype)
            for buffer, shard in zip((tokens, targets, *ropes), shards)
        )
        for model, rope in zip(script.models, cut):
            vars(model)["rope"] = rope
        tape.context = self.context

    def leave(self, script: Script) -> None:
        """The rope caches are restored."""
        with self.tape.phase(Phase.DATA, Owner.OTHER):
            for model, rope in zip(script.models, self._ropes):
                self.tape.recorder.memory_bound("aten::copy_", "copy", 2 * rope.bytes)
                vars(model)["rope"] = rope
            self._held.clear()
            self._ropes = []
        self.tape.context = None


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
