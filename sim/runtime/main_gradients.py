"""Megatron's data parallelism: gradients of a rank's parameters in one buffer, reduced over the replicas.

`.grad` is added to the main gradient as soon as it is there, and dropped. Buckets of the buffer are reduced whole
(all-reduce), or each to the shard of one rank (reduce-scatter, distributed optimizer): beside backward as they become
complete in the last micro-batch, or after it. Sequence-parallel ranks then sum what each has for its own tokens.
DeepSpeed's BF16_Optimizer keeps `.grad` until the next backward, adds fp32 copies after each and reduces whole.
Source: megatron-core 0.16.1, distributed/param_and_grad_buffer.py and finalize_model_grads.py, and DeepSpeed 0.8,
runtime/bf16_optimizer.py and runtime/pipe/engine.py, read there; no recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from sim.program.kernels import ITEM_BYTES, Collective, CollectiveKind
from sim.program.program import COMPUTE, DATA, Owner
from sim.runtime.recorder import Operators
from sim.runtime.scratch import round_up
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.parallel import DataParallel

LEAST_BUCKET = 40_000_000
"""Parameters of a bucket beside backward, or a million per replica if that is more."""
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements; only with the distributed optimizer
_REDUCE = Operators.number("megatron::reduce_gradients")


@dataclass(frozen=True, slots=True)
class Replicas:
    """Parameters in the model's order, of which `degree` ranks along a mesh dimension hold copies: dp, or edp of experts
    that are spread over ranks. All are stored in one dtype. `shards`: ranks over which a distributed optimizer splits
    them, those of one of its instances."""

    parameters: list[Tensor]
    degree: int
    group: str = "dp"
    shards: int = 1

    @property
    def dtype(self) -> str:
        return self.parameters[0].dtype


def replicas_of(parameters: list[Tensor], degree: int, data: DataParallel, group: str = "dp") -> list[Replicas]:
    """By dtype: parameters that are stored in 8 bit have buffers of their own."""
    shards = degree // data.optimizer_instances if data.distributed_optimizer else 1
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    return [Replicas([p for p in parameters if p.dtype == dtype], degree, group, shards) for dtype in dtypes]


def shard_group(group: str, instances: int) -> str:
    """The ranks of one instance of the optimizer, neighbours in the group of replicas."""
    return group if instances == 1 else f"{group}:shard"


@dataclass(slots=True)
class Bucket:
    """`elements` of a buffer, with padding; `missing`: parameters whose gradients are not complete."""

    replicas: Replicas
    elements: int = 0
    parameters: int = 0
    missing: int = 0


class MainGradients:
    """A buffer for each kind of replicas, and its buckets. `partial`: parameters with gradients of some tokens."""

    def __init__(
        self, tape: Tape, kinds: list[Replicas], partial: list[Tensor], data: DataParallel, dtype: str,
        tensor_ranks: int,
    ) -> None:  # fmt: skip
        self.tape = tape
        self.data = data
        self.dtype = dtype
        self.partial = partial
        self.tensor_ranks = tensor_ranks
        self.parameters = [parameter for replicas in kinds for parameter in replicas.parameters]
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self.buffers: list[Tensor] = []
        for replicas in kinds:
            first = len(self.buckets)
            self._fill_buckets(replicas)
            elements = sum(bucket.elements for bucket in self.buckets[first:])
            self.buffers.append(tape.empty((elements,), dtype, owner=Owner.GRADIENT))
        self.reduces_now = False
        """Backward of the last micro-batch comes or runs, and reduces as it goes."""
        self._last_reduction: int | None = None

    def _fill_buckets(self, replicas: Replicas) -> None:
        """From the last parameter to the first, as backward makes them complete."""
        data, parameters = self.data, replicas.parameters[::-1]
        limit = max(LEAST_BUCKET, 1_000_000 * replicas.degree) if data.overlap else None
        start, elements, members = 0, 0, 0
        for number, parameter in enumerate(parameters):
            if not members:
                bucket = Bucket(replicas)
                self.buckets.append(bucket)
            begin = round_up(elements, PARAMETER_ALIGNMENT) if data.distributed_optimizer else elements
            elements, members = begin + parameter.elements, members + 1
            self._bucket_of[id(parameter.storage)] = bucket
            if number == len(parameters) - 1 or (limit is not None and elements - start >= limit):
                if data.distributed_optimizer:
                    elements = round_up(elements, lcm(replicas.shards, BUCKET_ALIGNMENT))
                bucket.elements, bucket.parameters, bucket.missing = elements - start, members, members
                start, members = elements, 0

    # -- one backward ------------------------------------------------------------------------------------------
    def begin(self, last: bool) -> None:
        """A backward comes; gradients are reduced in the last."""
        self.reduces_now = last and self.data.overlap and any(b.replicas.degree > 1 for b in self.buckets)
        if self.data.keep_gradients:
            for parameter in self.parameters:
                parameter.grad = None
            self.tape.final_callbacks.append(self._add_kept)

    def _add_kept(self) -> None:
        """BF16_Optimizer.update_hp_grads."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                wide = self.tape.cast_copy(parameter.grad, self.dtype)
                self.tape.recorder.memory_bound("aten::add_", "elementwise", 3 * wide.bytes)
                del wide

    def holds(self, leaf: Tensor) -> bool:
        """Is it a parameter with a main gradient?"""
        return id(leaf.storage) in self._bucket_of

    def takes(self, weight: Tensor) -> bool:
        """Does the product for this weight's gradient add to the main gradient itself?"""
        return self.data.gradient_accumulation_fusion and not self.data.keep_gradients and self.holds(weight)

    def accumulate(self, leaf: Tensor) -> None:
        """The leaf's gradient of this micro-batch is complete."""
        if leaf.grad is not None and not self.data.keep_gradients:
            moved = leaf.grad.bytes + 2 * leaf.elements * ITEM_BYTES[self.dtype]
            self.tape.recorder.memory_bound("aten::add_", "elementwise", moved)
            leaf.grad = None
        if self.reduces_now:
            bucket = self._bucket_of[id(leaf.storage)]
            bucket.missing -= 1
            if not bucket.missing and bucket.replicas.degree > 1:
                self._reduce(bucket)

    def finish(self) -> None:
        """After the last backward: what is not reduced yet, then gradients of some tokens over the tensor ranks."""
        recorder = self.tape.recorder
        recorder.operator(_REDUCE)
        for bucket in self.buckets:
            if bucket.replicas.degree > 1 and bucket.missing:
                self._reduce(bucket)
            bucket.missing = bucket.parameters
        if self._last_reduction is not None:
            recorder.wait(COMPUTE, self._last_reduction)
        self._last_reduction, self.reduces_now = None, False
        if self.partial and self.tensor_ranks > 1:
            self._sum_partial()

    def zero_grad(self) -> None:
        for buffer in self.buffers:
            self.tape.recorder.memory_bound("aten::zero_", "fill", buffer.bytes)

    def _reduce(self, bucket: Bucket) -> None:
        """Scale by the number of replicas, then one collective on a stream of its own."""
        recorder, size_bytes = self.tape.recorder, bucket.elements * ITEM_BYTES[self.dtype]
        recorder.memory_bound("aten::mul_", "elementwise", 2 * size_bytes)
        recorder.stream_waits_stream(DATA, COMPUTE)
        for kind, group, ranks, moved_bytes in self._meetings(bucket.replicas, size_bytes):
            recorder.collective(Collective(kind, moved_bytes, group, ranks, self.dtype), DATA)
        self._last_reduction = recorder.record(DATA)

    def _meetings(self, replicas: Replicas, size_bytes: int) -> Iterator[tuple[CollectiveKind, str, int, int]]:
        """Summed whole; or scattered over the ranks of an instance, then each shard summed over the instances."""
        instances = self.data.optimizer_instances
        if not self.data.distributed_optimizer or self.data.keep_gradients:
            yield "all_reduce", replicas.group, replicas.degree, size_bytes
            return
        if replicas.shards > 1:
            yield "reduce_scatter", shard_group(replicas.group, instances), replicas.shards, size_bytes
        if instances > 1:
            yield "all_reduce", f"{replicas.group}:across", instances, size_bytes // replicas.shards

    def _sum_partial(self) -> None:
        """_allreduce_non_tensor_model_parallel_grads: flattened by a copy, summed, copied back."""
        recorder, elements = self.tape.recorder, sum(parameter.elements for parameter in self.partial)
        flat = self.tape.empty((elements,), self.dtype)
        recorder.memory_bound("aten::cat", "copy", 2 * flat.bytes)
        recorder.collective(Collective("all_reduce", flat.bytes, "tp", self.tensor_ranks, self.dtype), COMPUTE)
        recorder.memory_bound("aten::_foreach_copy_", "copy", 2 * flat.bytes)
