"""Gradients of a unit's parameters: kept unsharded, or reduced over the ranks into one buffer (FSDP.md 7 and 9)."""

from __future__ import annotations

from sim.program.kernels import ITEM_BYTES, Collective, HostCopy
from sim.program.program import ALL_REDUCE, COMPUTE, REDUCE_SCATTER, Owner
from sim.runtime import scratch
from sim.runtime.optimizer import cpu_work
from sim.runtime.recorder import Operators
from sim.runtime.sharding.parameters import ParameterGroup, ShardedParameter
from sim.runtime.tensor import Tensor

REDUCE = Operators.number("fsdp::reduce_scatter")


class Reduction:
    """What happens to the gradients of one group after its backward."""

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        self.tape = group.tape
        self.policy = group.policy
        self.communication = group.communication
        self.all_reduce_input: Tensor | None = None  # HSDP: kept until the final callback
        self.offloaded: int | None = None  # event of the last gradient on its way to the host

    def add_to_accumulated(self) -> None:
        """Gradients of a further micro-batch join the unsharded ones in place."""
        recorder = self.tape.recorder
        for p in self.group.parameters:
            if p.accumulated is not None and p.unsharded is not None and p.unsharded.grad is not None:
                recorder.memory_bound("aten::add_", "elementwise", 2 * p.accumulated.bytes + p.unsharded.grad.bytes)
                p.unsharded.grad = None

    def keep_unreduced(self) -> None:
        """No gradient sync: gradients become unsharded ones in the reduce dtype, kept for the next micro-batch."""
        dtype = self.policy.reduce_dtype
        last: Tensor | None = None
        for p in self.group.parameters:
            leaf = p.unsharded
            if dtype is None or leaf is None or leaf.grad is None or leaf.grad.dtype == dtype:
                continue
            last = leaf.grad
            leaf.grad = None
            p.accumulated = self.tape.empty(last.shape, dtype, owner=Owner.GRADIENT)
            self.tape.recorder.memory_bound("aten::copy_", "elementwise", last.bytes + p.accumulated.bytes)

    def collect(self) -> tuple[list[ShardedParameter], list[Tensor]]:
        owners: list[ShardedParameter] = []
        gradients: list[Tensor] = []
        for p in self.group.parameters:
            gradient = None
            if p.accumulated is not None:
                gradient, p.accumulated = p.accumulated, None
            elif p.unsharded is not None and p.unsharded.grad is not None:
                gradient, p.unsharded.grad = p.unsharded.grad, None
            if gradient is not None:
                if p.slot.partial and self.tape.tensor_ranks > 1:  # DTensor: Partial to Replicate
                    gradient = self._summed(gradient)
                owners.append(p)
                gradients.append(gradient)
        return owners, gradients

    def _summed(self, gradient: Tensor) -> Tensor:
        """A sum over the tensor-parallel ranks, into a copy."""
        tape = self.tape
        out = tape.pointwise("aten::clone", gradient.shape, gradient.dtype, None, gradient.bytes, "copy")
        work = Collective("all_reduce", out.bytes, "tp", tape.tensor_ranks, out.dtype)
        tape.recorder.collective(work, COMPUTE)
        return out

    def reduce(self, owners: list[ShardedParameter], gradients: list[Tensor]) -> tuple[Tensor, int]:
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
            self._offload(owners, out.dtype, stream)
            return
        for p in owners:
            assert p.sharded is not None
            gradient = out.alias((p.shard_elements,))
            if p.sharded.grad is None:
                p.sharded.grad = gradient
            else:
                self.tape.recorder.memory_bound("aten::add_", "elementwise", 3 * gradient.bytes, stream)
            del gradient
            if p.sharded.after_accumulate is not None:  # a step inside backward, on the stream of the reduction
                with self.tape.recorder.on_stream(stream):
                    p.sharded.after_accumulate(p.sharded)

    def _offload(self, owners: list[ShardedParameter], dtype: str, stream: int) -> None:
        """CPUOffloadPolicy: a copy to the host per parameter. The first of a step is not waited for before the final
        callback; a further micro-batch's is, since the CPU adds it to what is there (FSDP's foreach_reduce)."""
        recorder, host = self.tape.recorder, self.communication.host
        for p in owners:
            size_bytes = p.shard_elements * ITEM_BYTES[dtype]
            recorder.copy(HostCopy("device_to_host", size_bytes), stream)
            if p.host_gradient is None:
                p.host_gradient = host.take(size_bytes)
                continue
            recorder.sync(recorder.record(stream))
            cpu_work(recorder, 3 * size_bytes)
        self.offloaded = recorder.record(stream)
