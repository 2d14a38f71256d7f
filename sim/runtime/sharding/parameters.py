"""A group of sharded parameters: where they are, and the transitions between (TAPE_LLAMA_FSDP.md 3 and 4).

SHARDED ──gather──▶ pending ──land──▶ UNSHARDED ──drop──▶ SHARDED
                       ▲                  └──shrink──▶ POST_FORWARD ──┐
                       └──────────────── gather ──────────────────────┘
"""

from __future__ import annotations

from enum import Enum
from math import prod
from typing import Any

from sim.model.module import Parameter
from sim.program.kernels import ITEM_BYTES, Collective, HostCopy
from sim.program.program import ALL_GATHER, ALL_GATHER_COPY_IN, COMPUTE, Owner
from sim.runtime import scratch
from sim.runtime.recorder import Operators
from sim.runtime.sharding.communication import Communication, gathers_wait_for
from sim.runtime.sharding.policy import UnitPolicy
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

GATHER, COPY_OUT, RESHARD = (Operators.number(f"fsdp::{name}") for name in ("all_gather", "copy_out", "reshard"))


class Shards(Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    POST_FORWARD = "sharded to fewer ranks after forward"
    UNSHARDED = "gathered"


class ShardedParameter:
    """One parameter of a unit. `rows` of dimension 0 per rank, padded up; sizes in elements."""

    def __init__(self, slot: Parameter, ranks: int) -> None:
        self.slot = slot
        self.shape = slot.shape
        self.rows = scratch.ceil_div(slot.shape[0], ranks)
        self.shard_elements = self.rows * prod(slot.shape[1:])
        self.sharded: Tensor | None = None  # None: on the host
        self.unsharded: Tensor | None = None
        self.flat: Tensor | None = None  # the handle that owns the unsharded storage
        self.post_forward: Tensor | None = None
        self.accumulated: Tensor | None = None  # gradient kept unsharded while reduction waits
        self.host_gradient: int | None = None  # under CPU offload: its block of host memory

    def local_shape(self) -> tuple[int, ...]:
        return (min(self.rows, self.shape[0]), *self.shape[1:])


class ParameterGroup:
    """The parameters of one unit and their gathered copies."""

    def __init__(self, tape: Tape, communication: Communication, policy: UnitPolicy, slots: list[Parameter]) -> None:
        self.tape = tape
        self.communication = communication
        self.policy = policy
        self.parameters = [ShardedParameter(slot, policy.shard_ranks) for slot in slots]
        self.shards = Shards.SHARDED
        self.pending: Tensor | None = None  # all-gather output that waits for its copy-out
        self.pending_ranks = 0
        self.pending_event: int | None = None

    def gather(self, overlapped: bool) -> None:
        """Issue the all-gather: SHARDED or POST_FORWARD to pending. Nothing if it is pending or done.

        `overlapped`: on the all-gather streams, else on the caller's.
        """
        if self.pending is not None or self.shards is Shards.UNSHARDED:
            return
        policy, tape, recorder = self.policy, self.tape, self.tape.recorder
        recorder.operator(GATHER)
        recorder.host("fsdp_unit")
        copy_in, gather = (ALL_GATHER_COPY_IN, ALL_GATHER) if overlapped else (COMPUTE, COMPUTE)
        from_post_forward = self.shards is Shards.POST_FORWARD
        ranks = int(policy.reshard_after_forward) if from_post_forward else policy.shard_ranks
        if ranks == 1 and not from_post_forward:
            self.pending, self.pending_ranks = _NO_GATHER, 1
            return
        elements = sum(
            p.post_forward.elements if p.post_forward is not None else p.shard_elements for p in self.parameters
        )
        inputs = self._gather_inputs(elements, copy_in)
        dtype = policy.gathered_dtype
        if policy.matrix_dtype is not None:  # of several dtypes: gathered as bytes
            elements, dtype = sum(p.shard_elements * self._item_bytes(p) for p in self.parameters), "uint8"
        out = tape.empty((elements * ranks,), dtype, stream=copy_in, owner=Owner.GATHERED)
        recorder.memory_bound("fsdp::all_gather_copy_in", "copy", 2 * out.bytes // ranks, copy_in)
        del inputs
        if gather != copy_in:
            recorder.stream_waits_stream(gather, copy_in)
        group = "fsdp" if not from_post_forward else "fsdp_post_forward"
        recorder.collective(Collective("all_gather", out.bytes, group, ranks, dtype), gather)
        self.pending, self.pending_ranks = out, ranks
        self.pending_event = recorder.record(gather)

    def _item_bytes(self, p: ShardedParameter) -> int:
        return ITEM_BYTES[self.policy.gathered_dtype_of(p.shape)]

    def _gather_inputs(self, elements: int, stream: int) -> list[Tensor | None]:
        """The flat cast of the local shards; under CPU offload, or with casts to 8 bit, one per parameter."""
        if self.policy.cpu_offload or self.policy.matrix_dtype is not None:
            return [self._gather_input(p, stream) for p in self.parameters]
        return [self._flat(elements, stream)] if self.policy.casts else []

    def _gather_input(self, p: ShardedParameter, stream: int) -> Tensor | None:
        """FSDPParam.all_gather_inputs: one shard, copied to the device and cast; None where it is taken as it is."""
        policy, tape, recorder = self.policy, self.tape, self.tape.recorder
        local: Tensor | None = None
        if p.post_forward is not None:  # on the device and cast already
            return None
        if policy.cpu_offload:
            local = tape.empty((p.shard_elements,), policy.original_dtype, stream=stream, owner=Owner.GATHERED)
            recorder.copy(HostCopy("host_to_device", local.bytes), stream)
        if not policy.casts:
            return local
        dtype = policy.gathered_dtype_of(p.shape)
        cast = tape.empty((p.shard_elements,), dtype, stream=stream, owner=Owner.GATHERED)
        read = p.shard_elements * ITEM_BYTES[policy.original_dtype]
        recorder.memory_bound("aten::copy_", "elementwise", read + cast.bytes, stream)
        return cast

    def _flat(self, elements: int, stream: int) -> Tensor:
        flat = self.tape.empty((elements,), self.policy.gathered_dtype, stream=stream, owner=Owner.GATHERED)
        read = elements * ITEM_BYTES[self.policy.original_dtype]
        self.tape.recorder.memory_bound("aten::_foreach_copy_", "copy", read + flat.bytes, stream)
        return flat

    def land(self, forward: bool) -> None:
        """Copy the gathered bytes out into the parameters: pending to UNSHARDED.

        In forward the output lives on until the next unit has landed; in backward it dies here.
        """
        if self.pending is None:
            return
        policy, tape, recorder, communication = self.policy, self.tape, self.tape.recorder, self.communication
        previous = None
        if forward:  # the previous unit's output lives until this one has been copied out
            previous, communication.deferred_gather = communication.deferred_gather, None
            if communication.deferred_event is not None and previous is not None:
                gathers_wait_for(recorder, communication.deferred_event)
        recorder.operator(COPY_OUT)
        if self.pending_event is not None:
            recorder.wait(COMPUTE, self.pending_event)
        local: Tensor | None = None
        for p in self.parameters:
            if policy.shard_ranks == 1:  # one rank: per parameter its input, then the unsharded copy
                local = self._gather_input(p, COMPUTE)
            self._allocate_unsharded(p)
        del local
        if policy.shard_ranks > 1:
            ranks = policy.shard_ranks // self.pending_ranks
            chunks = [p.shard_elements * ranks * self._item_bytes(p) for p in self.parameters]
            tape.scratch(scratch.split_copy_table(tape.device, chunks, self.pending_ranks))
        moved = sum(p.flat.bytes for p in self.parameters if p.flat is not None)
        recorder.memory_bound("fsdp::split_with_sizes_copy", "copy", 2 * moved)
        for p in self.parameters:
            p.slot.tensor = p.unsharded
            p.post_forward = None
        self.shards = Shards.UNSHARDED
        gathers = policy.shard_ranks > 1
        copied = recorder.record(COMPUTE) if gathers else None
        if forward and gathers:
            communication.deferred_gather, communication.deferred_event = self.pending, copied
        elif copied is not None:
            gathers_wait_for(recorder, copied)
        self.pending = self.pending_event = None
        del previous

    def _allocate_unsharded(self, p: ShardedParameter) -> None:
        """The unsharded parameter is one tensor for the whole run; its storage is resized to 0 and back."""
        if p.unsharded is not None:
            p.unsharded.storage.fill()
            return
        dtype = self.policy.gathered_dtype_of(p.shape)
        flat = self.tape.empty((self.policy.shard_ranks * p.shard_elements,), dtype, owner=Owner.GATHERED)
        p.flat = flat
        p.unsharded = Tensor(flat.storage, p.shape, dtype)
        p.unsharded.requires_grad = p.slot.requires_grad

    def drop(self) -> None:
        """Give the gathered parameters back: to SHARDED."""
        self.tape.recorder.operator(RESHARD)
        if self.shards is Shards.SHARDED:
            return
        for p in self.parameters:
            p.slot.tensor = p.sharded
            if p.unsharded is not None:
                p.unsharded.storage.drop()
        self.shards = Shards.SHARDED

    def shrink(self, ranks: int) -> None:
        """Keep a shard over fewer ranks of each gathered parameter: to POST_FORWARD."""
        self.tape.recorder.operator(RESHARD)
        if self.shards is Shards.POST_FORWARD:
            return
        for p in self.parameters:
            elements = p.shard_elements * self.policy.shard_ranks // ranks
            p.post_forward = self.tape.empty((elements,), self.policy.gathered_dtype, owner=Owner.GATHERED)
            self.tape.recorder.memory_bound("aten::clone", "copy", 2 * p.post_forward.bytes)
            assert p.unsharded is not None
            p.unsharded.storage.drop()
        self.shards = Shards.POST_FORWARD

    def forget_pending(self) -> None:
        """Drop an all-gather output that nobody waited for."""
        self.pending = self.pending_event = None


class _NoGather:
    """Stands for the all-gather output where one rank owns everything."""


_NO_GATHER: Any = _NoGather()
