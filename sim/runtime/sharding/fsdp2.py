"""FSDP2's fully_shard as a state machine: one Unit per parameter group, one Communication per root.

FSDP.md and TAPE_LLAMA_FSDP.md sections 3 and 4 are the rules; names follow torch.distributed.fsdp. Buffers whose death
is a rule of its own are named owners: `deferred_gather` (an all-gather output that outlives its unit's copy-out),
`reduce_inputs` (reduce-scatter inputs kept until their turn), the last gradient of a unit.
"""

from __future__ import annotations

from enum import Enum
from math import prod
from typing import Any

from sim.model.module import Module, Parameter
from sim.program.kernels import ITEM_BYTES, Collective
from sim.program.program import (
    ALL_GATHER,
    ALL_GATHER_COPY_IN,
    ALL_REDUCE,
    COMPUTE,
    REDUCE_SCATTER,
    Owner,
)
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op
from sim.runtime.ops.pointwise import to
from sim.runtime.recorder import Operators
from sim.runtime.sharding.policy import UnitPolicy
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

GATHER, COPY_OUT, RESHARD, REDUCE = (
    Operators.number(f"fsdp::{name}") for name in ("all_gather", "copy_out", "reshard", "reduce_scatter")
)


class Shards(Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    POST_FORWARD = "sharded to fewer ranks after forward"
    UNSHARDED = "gathered"


class Training(Enum):
    """What a module, or a parameter group, is doing. The two differ while a region is recomputed."""

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    POST_BACKWARD = "post-backward"


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

    def local_shape(self) -> tuple[int, ...]:
        return (min(self.rows, self.shape[0]), *self.shape[1:])


class Communication:
    """What the units of one root share."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.deferred_gather: Tensor | None = None
        self.deferred_event: int | None = None
        self.reduce_inputs: list[tuple[Tensor, int]] = []  # with the event of their reduction
        self.post_forward_order: list[Unit] = []
        self.root_of_this_forward: Unit | None = None
        self.final_callback_queued = False
        self.last_reduction: int | None = None
        self.is_last_backward = True


class _RegisterPostBackward(Op):
    """An identity over a unit's inputs whose backward is the unit's post_backward."""

    node = "RegisterPostBackwardFunctionBackward"

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(x.alias(x.shape, x.strides) for x in arguments if isinstance(x, Tensor))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        node.attributes[0].post_backward()
        return list(gradients)


class Unit:
    """A parameter group and the hooks of its modules."""

    def __init__(
        self, tape: Tape, communication: Communication, name: str, modules: list[Module], slots: list[Parameter],
        policy: UnitPolicy,
    ) -> None:  # fmt: skip
        self.tape = tape
        self.communication = communication
        self.name = name
        self.modules = modules
        self.policy = policy
        self.parameters = [ShardedParameter(slot, policy.shard_ranks) for slot in slots]
        self.training = Training.IDLE
        self.module_training = Training.IDLE
        self.shards = Shards.SHARDED
        self.pending: Tensor | None = None  # all-gather output that waits for its copy-out
        self.pending_ranks = 0
        self.pending_event: int | None = None
        self.positions: list[int] = []  # in post_forward_order
        self.reduces = True
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] | None = None
        self.all_reduce_input: Tensor | None = None
        self._to_run: set[Module] = set()
        communication.units.append(self)
        for module in modules:
            module.hooks = self

    # -- hooks around forward ----------------------------------------------------------------------------------
    def pre_forward(self, module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.module_training is Training.PRE_BACKWARD:  # a recomputation inside this unit's backward
            if self.parameters and self.shards is not Shards.UNSHARDED:
                self.unshard()
                self.wait_for_unshard()
            return self._cast(arguments)
        begins = self.module_training is not Training.FORWARD
        self.module_training = Training.FORWARD
        if begins:
            if len(self.modules) > 1:
                self._to_run = set(self.modules)
            if self.communication.root_of_this_forward is None:
                self.communication.root_of_this_forward = self
                self._streams_wait_for_compute()
        arguments = self._cast(arguments)
        if self.parameters:
            enters = self.training is not Training.FORWARD
            self.training = Training.FORWARD
            self.unshard()
            self.wait_for_unshard()
            if enters and self.tape.grad_enabled:
                arguments = self._register_post_backward(arguments)
        if begins:
            for target in self.forward_prefetch:
                target.prefetch(Training.FORWARD)
        return arguments

    def post_forward(self, module: Module, output: Any) -> Any:
        if self.module_training is Training.PRE_BACKWARD:
            return output
        if len(self.modules) > 1:
            self._to_run.discard(module)
            if self._to_run:
                return output
        communication = self.communication
        if self.parameters:
            if not self.tape.engine_running:
                self.reshard()
                communication.post_forward_order.append(self)
                self.positions.append(len(communication.post_forward_order) - 1)
            self.training = Training.IDLE
        for tensor in output if isinstance(output, tuple) else (output,):
            if self.tape.grad_enabled and tensor.node is not None:
                tensor.node.pre_hooks = [*(tensor.node.pre_hooks or []), self.pre_backward]
        self.module_training = Training.IDLE
        if communication.root_of_this_forward is self:
            communication.deferred_gather = None
            communication.root_of_this_forward = None
        return output

    def _cast(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = self.policy.cast_inputs
        if dtype is None:
            return arguments
        return tuple(
            to(self.tape, a, dtype) if isinstance(a, Tensor) and a.dtype in ("bf16", "fp16", "fp32") else a
            for a in arguments
        )

    def _register_post_backward(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        tracked = tuple(a for a in arguments if a.requires_grad)
        if not tracked:
            return arguments
        passed = iter(self.tape.apply_tuple(_RegisterPostBackward, tracked, self))
        return tuple(next(passed) if a.requires_grad else a for a in arguments)

    # -- gathering ---------------------------------------------------------------------------------------------
    def unshard(self) -> None:
        """Issue the all-gather (transition to pending). Nothing if it is pending or done."""
        if self.pending is not None or self.shards is Shards.UNSHARDED:
            return
        policy, tape, recorder = self.policy, self.tape, self.tape.recorder
        recorder.operator(GATHER)
        recorder.host("fsdp_unit")
        overlapped = self.training in (Training.FORWARD, Training.PRE_BACKWARD)
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
        out = tape.empty((elements * ranks,), policy.gathered_dtype, stream=copy_in, owner=Owner.GATHERED)
        recorder.memory_bound("fsdp::all_gather_copy_in", "copy", 2 * out.bytes // ranks, copy_in)
        del inputs
        if gather != copy_in:
            recorder.stream_waits_stream(gather, copy_in)
        group = "fsdp" if not from_post_forward else "fsdp_post_forward"
        recorder.collective(Collective("all_gather", out.bytes, group, ranks, policy.gathered_dtype), gather)
        self.pending, self.pending_ranks = out, ranks
        self.pending_event = recorder.record(gather)

    def _gather_inputs(self, elements: int, stream: int) -> list[Tensor | None]:
        """The flat cast of the local shards; under CPU offload one copy and cast per parameter."""
        if self.policy.cpu_offload:
            return [self._gather_input(p, stream) for p in self.parameters]
        return [self._flat(elements, stream)] if self.policy.casts else []

    def _gather_input(self, p: ShardedParameter, stream: int) -> Tensor | None:
        """FSDPParam.all_gather_inputs: one shard, copied to the device and cast; None where it is taken as it is."""
        policy, tape, recorder = self.policy, self.tape, self.tape.recorder
        local: Tensor | None = None
        if policy.cpu_offload:
            local = tape.empty((p.shard_elements,), policy.original_dtype, stream=stream, owner=Owner.GATHERED)
            recorder.memory_bound("Memcpy HtoD (Pinned -> Device)", "copy_from_host", local.bytes, stream)
        if not policy.casts:
            return local
        cast = tape.empty((p.shard_elements,), policy.gathered_dtype, stream=stream, owner=Owner.GATHERED)
        read = p.shard_elements * ITEM_BYTES[policy.original_dtype]
        recorder.memory_bound("aten::copy_", "elementwise", read + cast.bytes, stream)
        return cast

    def _flat(self, elements: int, stream: int) -> Tensor:
        flat = self.tape.empty((elements,), self.policy.gathered_dtype, stream=stream, owner=Owner.GATHERED)
        read = elements * ITEM_BYTES[self.policy.original_dtype]
        self.tape.recorder.memory_bound("aten::_foreach_copy_", "copy", read + flat.bytes, stream)
        return flat

    def wait_for_unshard(self) -> None:
        """Copy the gathered bytes out into the parameters (transition to UNSHARDED)."""
        if self.pending is None:
            return
        policy, tape, recorder, communication = self.policy, self.tape, self.tape.recorder, self.communication
        forward = self.training is Training.FORWARD
        previous = None
        if forward:  # the previous unit's output lives until this one has been copied out
            previous, communication.deferred_gather = communication.deferred_gather, None
            if communication.deferred_event is not None and previous is not None:
                recorder.wait(ALL_GATHER_COPY_IN, communication.deferred_event)
                recorder.wait(ALL_GATHER, communication.deferred_event)
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
            size = policy.gathered_item_bytes
            chunks = [p.shard_elements * policy.shard_ranks // self.pending_ranks * size for p in self.parameters]
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
            recorder.wait(ALL_GATHER_COPY_IN, copied)
            recorder.wait(ALL_GATHER, copied)
        self.pending = self.pending_event = None
        del previous

    def _allocate_unsharded(self, p: ShardedParameter) -> None:
        """The unsharded parameter is one tensor for the whole run; its storage is resized to 0 and back."""
        if p.unsharded is not None:
            p.unsharded.storage.fill()
            return
        dtype = self.policy.gathered_dtype
        flat = self.tape.empty((self.policy.shard_ranks * p.shard_elements,), dtype, owner=Owner.GATHERED)
        p.flat = flat
        p.unsharded = Tensor(flat.storage, p.shape, dtype)
        p.unsharded.requires_grad = p.slot.requires_grad

    def reshard(self) -> None:
        """Give the gathered parameters back: all, or but a shard over fewer ranks."""
        policy = self.policy
        self.tape.recorder.operator(RESHARD)
        if self.training is Training.FORWARD:
            if policy.reshard_after_forward is False:
                return
            if policy.reshard_after_forward is not True:
                self._shard_to_fewer_ranks(int(policy.reshard_after_forward))
                return
        if self.shards is Shards.SHARDED:
            return
        for p in self.parameters:
            p.slot.tensor = p.sharded
            if p.unsharded is not None:
                p.unsharded.storage.drop()
        self.shards = Shards.SHARDED

    def _shard_to_fewer_ranks(self, ranks: int) -> None:
        if self.shards is Shards.POST_FORWARD:
            return
        for p in self.parameters:
            elements = p.shard_elements * self.policy.shard_ranks // ranks
            p.post_forward = self.tape.empty((elements,), self.policy.gathered_dtype, owner=Owner.GATHERED)
            self.tape.recorder.memory_bound("aten::clone", "copy", 2 * p.post_forward.bytes)
            assert p.unsharded is not None
            p.unsharded.storage.drop()
        self.shards = Shards.POST_FORWARD

    def prefetch(self, training: Training) -> None:
        """Issue this unit's all-gather ahead of its time."""
        before, self.training = self.training, training
        self.unshard()
        self.training = before

    # -- hooks around backward ---------------------------------------------------------------------------------
    def pre_backward(self, gradients: Gradients) -> None:
        """Before the node that made the unit's output runs, with the output's gradient."""
        communication = self.communication
        self.module_training = Training.PRE_BACKWARD
        if not communication.final_callback_queued:
            communication.final_callback_queued = True
            self.tape.final_callbacks.append(lambda: finish_backward(communication))
        if not self.parameters or self.training is Training.PRE_BACKWARD:
            return
        self.training = Training.PRE_BACKWARD
        self.unshard()
        self.wait_for_unshard()
        if self.backward_prefetch:  # an empty list counts as none (_fsdp_state.py, _pre_backward)
            for target in self.backward_prefetch:
                target.prefetch(Training.PRE_BACKWARD)
        elif self.positions:
            position = self.positions.pop()
            if position > 0:
                communication.post_forward_order[position - 1].prefetch(Training.PRE_BACKWARD)

    def post_backward(self) -> None:
        """After the gradient of the unit's inputs: reshard, then reduce."""
        self.training = Training.POST_BACKWARD
        recorder = self.tape.recorder
        recorder.host("fsdp_unit")
        for p in self.parameters:
            if p.accumulated is not None and p.unsharded is not None and p.unsharded.grad is not None:
                recorder.memory_bound("aten::add_", "elementwise", 2 * p.accumulated.bytes + p.unsharded.grad.bytes)
                p.unsharded.grad = None
        if not self.reduces:
            self._keep_unreduced()
            return
        owners, gradients = self._collect_gradients()
        if self.policy.reshard_after_backward:
            self.reshard()
        kept = self.communication.reduce_inputs
        while len(kept) >= self.policy.reduce_scatter_buffers:
            recorder.wait(COMPUTE, kept[0][1])
            kept.pop(0)
        if gradients:
            kept.append(self._reduce(owners, gradients))

    def _keep_unreduced(self) -> None:
        """No gradient sync: gradients become unsharded ones in the reduce dtype, kept for the next micro-batch."""
        dtype = self.policy.reduce_dtype
        self.reshard()
        last: Tensor | None = None
        for p in self.parameters:
            leaf = p.unsharded
            if dtype is None or leaf is None or leaf.grad is None or leaf.grad.dtype == dtype:
                continue
            last = leaf.grad
            leaf.grad = None
            p.accumulated = self.tape.empty(last.shape, dtype, owner=Owner.GRADIENT)
            self.tape.recorder.memory_bound("aten::copy_", "elementwise", last.bytes + p.accumulated.bytes)

    def _collect_gradients(self) -> tuple[list[ShardedParameter], list[Tensor]]:
        owners: list[ShardedParameter] = []
        gradients: list[Tensor] = []
        for p in self.parameters:
            gradient = None
            if p.accumulated is not None:
                gradient, p.accumulated = p.accumulated, None
            elif p.unsharded is not None and p.unsharded.grad is not None:
                gradient, p.unsharded.grad = p.unsharded.grad, None
            if gradient is not None:
                owners.append(p)
                gradients.append(gradient)
        return owners, gradients

    def _reduce(self, owners: list[ShardedParameter], gradients: list[Tensor]) -> tuple[Tensor, int]:
        """foreach_reduce: copy in, reduce-scatter, and the local shards' gradients as views of one buffer."""
        policy, tape, recorder = self.policy, self.tape, self.tape.recorder
        recorder.operator(REDUCE)
        dtype = policy.reduce_dtype or gradients[0].dtype
        elements = sum(p.shard_elements for p in owners)
        copied = sum(g.bytes for g in gradients)
        last = gradients[-1] if policy.shard_ranks > 1 else None  # a loop variable holds it until the output exists
        reduce_input = tape.empty((elements * policy.shard_ranks,), dtype, owner=Owner.REDUCE_SCATTER)
        tape.scratch(scratch.chunk_cat_table([p.shard_elements * ITEM_BYTES[dtype] for p in owners]))
        recorder.memory_bound("fsdp::chunk_cat", "copy", copied + reduce_input.bytes)
        while gradients:
            gradients.pop()
        recorder.stream_waits_stream(REDUCE_SCATTER, COMPUTE)
        out = tape.empty((elements,), dtype, stream=REDUCE_SCATTER, owner=Owner.GRADIENT)
        if policy.shard_ranks > 1:
            work = Collective("reduce_scatter", reduce_input.bytes, "fsdp", policy.shard_ranks, dtype)
            recorder.collective(work, REDUCE_SCATTER)
        reduced = recorder.record(REDUCE_SCATTER)
        stream = REDUCE_SCATTER
        if policy.replicas > 1:
            stream = ALL_REDUCE
            recorder.wait(ALL_REDUCE, reduced)
            recorder.collective(Collective("all_reduce", out.bytes, "replicate", policy.replicas, dtype), ALL_REDUCE)
            self.all_reduce_input = out
        if dtype != policy.original_dtype:
            out = tape.empty((elements,), policy.original_dtype, stream=stream, owner=Owner.GRADIENT)
            recorder.memory_bound("aten::copy_", "elementwise", out.bytes, stream)
        self._deliver(owners, out, stream)
        self.communication.last_reduction = recorder.record(stream)
        del last
        return reduce_input, reduced

    def _deliver(self, owners: list[ShardedParameter], out: Tensor, stream: int) -> None:
        """.grad of each local shard: a view of the buffer, or added in place to what is there."""
        if self.policy.cpu_offload:
            self.tape.recorder.memory_bound("Memcpy DtoH (Device -> Pinned)", "copy_to_host", out.bytes, stream)
            return
        for p in owners:
            assert p.sharded is not None
            gradient = out.alias((p.shard_elements,))
            if p.sharded.grad is None:
                p.sharded.grad = gradient
            else:
                self.tape.recorder.memory_bound("aten::add_", "elementwise", 3 * gradient.bytes, stream)
            del gradient

    # -- streams -----------------------------------------------------------------------------------------------
    def _streams_wait_for_compute(self) -> None:
        """The root's pre-forward: gathers wait for what compute has been given so far (the optimizer)."""
        if self.tape.engine_running:
            return
        event = self.tape.recorder.record(COMPUTE)
        for stream in (ALL_GATHER_COPY_IN, ALL_GATHER):
            self.tape.recorder.wait(stream, event)


def finish_backward(communication: Communication) -> None:
    """The final callback: units that got no post-backward, then everything kept until now dies."""
    for unit in communication.units:
        if unit.parameters:
            if unit.training is not Training.POST_BACKWARD:
                unit.post_backward()
            unit.training = Training.IDLE
        unit.module_training = Training.IDLE
        if communication.is_last_backward:
            unit.pending = unit.pending_event = unit.all_reduce_input = None
            unit.positions.clear()
    if communication.is_last_backward:
        communication.post_forward_order.clear()
        if communication.last_reduction is not None and communication.units:
            communication.units[0].tape.recorder.wait(COMPUTE, communication.last_reduction)
            communication.last_reduction = None
        communication.reduce_inputs.clear()
    communication.final_callback_queued = False
    communication.root_of_this_forward = None


class _NoGather:
    """Stands for the all-gather output where one rank owns everything."""


_NO_GATHER: Any = _NoGather()
