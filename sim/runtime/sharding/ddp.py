"""DistributedDataParallel's Reducer: gradients in buckets, each summed as soon as it is complete.

The first iteration has one bucket. Its order of arrival makes the buckets of all later ones: the first is full at 1 MiB,
the others at 25 MiB. With static_graph the first iteration only counts which gradients come, and sums when backward has
ended; the second has its order of arrival seen, the third has new buckets. Source: torch 2.14,
csrc/distributed/c10d/reducer.cpp and nn/parallel/distributed.py; recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sim.model.module import Module
from sim.program.kernels import ITEM_BYTES, Collective, HostCopy
from sim.program.program import COMPUTE, DATA, Owner, Phase
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op
from sim.runtime.recorder import Operators
from sim.runtime.sharding.family import Family
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.parallel import Ddp

DEFAULT_CAP_BYTES, FIRST_CAP_BYTES = 25 << 20, 1 << 20
_REDUCE, _REBUILD, _BROADCAST = (
    Operators.number(f"ddp::{name}") for name in ("reduce", "rebuild_buckets", "broadcast_buffers")
)


@dataclass(slots=True)
class Bucket:
    """`missing`: members whose gradients are not in `buffer` yet."""

    members: list[Tensor]
    buffer: Tensor
    missing: int


def full_buckets(members: list[Tensor], caps_bytes: tuple[int, ...]) -> list[list[Tensor]]:
    """compute_bucket_assignment_by_size: a bucket is closed once it holds its cap; the last cap holds for the rest."""
    buckets: list[list[Tensor]] = []
    begun: list[Tensor] = []
    for member in members:
        begun.append(member)
        if sum(p.bytes for p in begun) >= caps_bytes[min(len(buckets), len(caps_bytes) - 1)]:
            buckets.append(begun)
            begun = []
    return [*buckets, begun] if begun else buckets


class Reducer:
    """`parameters`: those that are trained, in the model's order; `buffers`: what rank 0 broadcasts."""

    def __init__(self, tape: Tape, ddp: Ddp, parameters: list[Tensor], buffers: list[Tensor]) -> None:
        self.tape = tape
        self.ddp = ddp
        self.parameters = parameters
        self.buffers = buffers if ddp.broadcast_buffers else []
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._arrived: list[Tensor] | None = []
        """Until buckets are rebuilt: the order in which gradients came."""
        self._reduces = True
        self._buffers_are_due = True
        self._sums: list[int] = []
        """Events of the buckets that are on their way."""
        self.waits_for_end = ddp.static_graph
        """The first iteration of a static graph: nothing is summed before backward has ended."""
        self._allocate([parameters])
        self._used = self.tape.empty((len(parameters),), "int32", owner=Owner.OTHER) if ddp.static_graph else None
        for parameter in parameters:
            parameter.post_hook = self._take

    def _allocate(self, assignment: list[list[Tensor]]) -> None:
        self.buckets.clear()
        self._bucket_of.clear()
        for members in assignment:
            elements = sum(p.elements for p in members)
            buffer = self.tape.empty((elements,), members[0].dtype, owner=Owner.GRADIENT)
            bucket = Bucket(members, buffer, len(members))
            self.buckets.append(bucket)
            self._bucket_of |= {id(p): bucket for p in members}
            for member in members:
                if self.ddp.gradient_as_bucket_view and member.grad is not None:
                    self.tape.recorder.memory_bound("aten::copy_", "copy", 2 * member.grad.bytes)
                    member.grad = buffer.alias(member.grad.shape, member.grad.strides)
            del buffer, bucket

    # -- before forward ----------------------------------------------------------------------------------------
    def begin(self, last: bool) -> None:
        """DistributedDataParallel._pre_forward."""
        self._reduces = last or self.ddp.gradient_sync == "every"
        recorder = self.tape.recorder
        with self.tape.phase(Phase.FORWARD, Owner.OTHER):
            if self._arrived:
                recorder.operator(_REBUILD)
                self._rebuild(self._arrived)
                self._arrived = None
            if self._buffers_are_due and self.buffers:
                recorder.operator(_BROADCAST)
                self._broadcast()
        self._buffers_are_due = self._reduces

    def _rebuild(self, arrived: list[Tensor]) -> None:
        """The new assignment is rank 0's: indices and sizes go round, the host waits for them; then old buckets die."""
        cap = self.ddp.bucket_cap
        caps = (FIRST_CAP_BYTES, DEFAULT_CAP_BYTES) if cap is None else (cap,)
        assignment = full_buckets(arrived, caps)
        held = []
        for count in (len(arrived) + 1, len(assignment)):
            numbers = self.tape.empty((count,), "int32")
            self._collective("broadcast", numbers.bytes, "int32")
            self.tape.recorder.wait(COMPUTE, self._sums.pop())
            self.tape.recorder.sync(self.tape.recorder.record(COMPUTE))
            held.append(numbers)
            del numbers
        del held
        self._allocate(assignment)

    def _broadcast(self) -> None:
        """Buffers of a dtype are flattened into one where there are several."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in self.buffers):
            sizes = [buffer.bytes for buffer in self.buffers if buffer.dtype == dtype]
            elements = sum(sizes) // ITEM_BYTES[dtype]
            flat = self.tape.empty((elements,), dtype) if len(sizes) > 1 else None
            if flat is not None:
                self.tape.recorder.memory_bound("aten::cat", "copy", 2 * flat.bytes)
            self._collective("broadcast", sum(sizes), dtype)
            self.tape.recorder.wait(COMPUTE, self._sums.pop())
            if flat is not None:
                self.tape.recorder.memory_bound("aten::copy_", "copy", 2 * flat.bytes)

    # -- in backward -------------------------------------------------------------------------------------------
    def _take(self, leaf: Tensor) -> None:
        """Reducer::mark_variable_ready: the gradient goes into its bucket, divided by the number of replicas."""
        if not self._reduces or self.waits_for_end:
            return
        if self._arrived is not None:
            self._arrived.append(leaf)
        self._fill(leaf)
        self._sum_complete()

    def _fill(self, leaf: Tensor) -> None:
        recorder = self.tape.recorder
        recorder.operator(_REDUCE)
        bucket, gradient = self._bucket_of[id(leaf)], leaf.grad
        assert gradient is not None
        if gradient.storage is bucket.buffer.storage:
            recorder.memory_bound("aten::div_", "elementwise", 2 * gradient.bytes)
        else:
            recorder.memory_bound("aten::mul", "elementwise", 2 * gradient.bytes)
            if self.ddp.gradient_as_bucket_view:
                leaf.grad = bucket.buffer.alias(gradient.shape, gradient.strides)
        bucket.missing -= 1

    def sum_at_end(self) -> None:
        """Reducer::delay_all_reduce: who has a gradient goes round, then all gradients are put into buckets and summed."""
        assert self._used is not None
        recorder = self.tape.recorder
        recorder.operator(_REDUCE)
        recorder.copy(HostCopy("host_to_device", self._used.bytes), COMPUTE)
        self._collective("all_reduce", self._used.bytes, "int32")
        self._sums.clear()
        self.waits_for_end = False
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._fill(parameter)
        self._sum_complete()

    def _sum_complete(self) -> None:
        """All-reduce complete buckets, never one before those in front of it."""
        while len(self._sums) < len(self.buckets) and not self.buckets[len(self._sums)].missing:
            buffer = self.buckets[len(self._sums)].buffer
            self._collective("all_reduce", buffer.bytes, buffer.dtype)
            if len(self._sums) == len(self.buckets):
                self.tape.final_callbacks.append(self._finalize)

    def _finalize(self) -> None:
        """Reducer::finalize_backward: compute waits for every bucket; gradients that are no views are copied out."""
        recorder = self.tape.recorder
        recorder.operator(_REDUCE)
        for event, bucket in zip(self._sums, self.buckets):
            recorder.wait(COMPUTE, event)
            if not self.ddp.gradient_as_bucket_view:
                for member in bucket.members:
                    recorder.memory_bound("aten::copy_", "copy", 2 * member.bytes)
            bucket.missing = len(bucket.members)
        self._sums.clear()

    def _collective(self, kind: Literal["all_reduce", "broadcast"], size_bytes: int, dtype: str) -> None:
        recorder = self.tape.recorder
        recorder.stream_waits_stream(DATA, COMPUTE)
        if self.ddp.degree > 1:
            recorder.collective(Collective(kind, size_bytes, "dp", self.ddp.degree, dtype), DATA)
        self._sums.append(recorder.record(DATA))

    def finish(self) -> None:
        for parameter in self.parameters:
            parameter.post_hook = None


class DdpSink(Op):
    """_DDPSink: outputs of the first iteration of a static graph are cloned; its backward asks for `sum_at_end`."""

    node = "_DDPSinkBackward"

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(tape.copy(x) for x in arguments if isinstance(x, Tensor))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        reducer: Reducer = node.attributes[0]
        if reducer.waits_for_end:
            tape.final_callbacks.append(reducer.sum_at_end)
        unused = len(node.edges) - len(gradients)  # a model that computes its loss returns logits too
        return [*gradients, *[None] * unused]


class Sink:
    """Hooks of the whole model: what it returns goes through DdpSink while the first iteration lasts."""

    def __init__(self, family: DistributedDataParallel) -> None:
        self.family = family

    def pre_forward(self, module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return arguments

    def post_forward(self, module: Module, output: Any) -> Any:
        reducer = self.family.reducer
        if reducer is None or not reducer.waits_for_end:
            return output
        several = self.family.tape.apply_tuple(DdpSink, output if isinstance(output, tuple) else (output,), reducer)
        return several if isinstance(output, tuple) else several[0]


class DistributedDataParallel(Family):
    """The family: a reducer over the parameters that are trained."""

    def __init__(self, tape: Tape, ddp: Ddp) -> None:
        super().__init__(tape)
        self.ddp = ddp
        self.reducer: Reducer | None = None
        self._model: Module | None = None

    def wrap(self, model: Module, blocks: Sequence[Module], outer: Sequence[Module]) -> None:
        if self.ddp.static_graph:
            self._model = model
            model.hooks = Sink(self)

    def start(self, parameters: list[Tensor], buffers: list[Tensor]) -> None:
        self.reducer = Reducer(self.tape, self.ddp, [p for p in parameters if p.requires_grad], buffers)

    def begin(self, last: bool) -> None:
        assert self.reducer is not None
        self.reducer.begin(last)

    def finish(self) -> None:
        if self.reducer is not None:
            self.reducer.finish()
        if self._model is not None:
            self._model.hooks = None
