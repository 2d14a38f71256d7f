"""DeepSpeed's ZeRO stages 1 and 2: 16-bit parameters in one flat tensor, of which every rank steps an equal part in fp32.

Gradients are copied into a bucket as they come, summed over the ranks bucket by bucket, and only those of the own part
are kept (stage 2: from then on; stage 1: after the last micro-batch). Source: DeepSpeed 0.19.8,
runtime/zero/stage_1_and_2.py; its own runs over a fake driver were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sim.model.module import Module, Parameter
from sim.program.kernels import ITEM_BYTES, Collective, HostCopy
from sim.program.program import COMPUTE, DATA, Owner
from sim.runtime.host_memory import HostMemory
from sim.runtime.optimizer import StepOptimizer
from sim.runtime.recorder import Operators
from sim.runtime.scratch import round_up
from sim.runtime.sharding.family import Family
from sim.runtime.sharding.zero_host import HostStep, LeavingGradients
from sim.runtime.sharding.zero_step import PartitionStep
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.parallel import Zero
from sim.scenario.setup import Optimizer, Precision

ALIGNMENT = 2
"""Elements per rank to which the flat parameter is padded (nccl_start_alignment_factor)."""
_REDUCE = Operators.number("zero::reduce_bucket")


class ZeroPartition(Family):
    """The family. Rank 0 is played: its part begins with the first parameters of the model."""

    def __init__(self, tape: Tape, zero: Zero, precision: Precision, memory: HostMemory) -> None:
        super().__init__(tape)
        self.zero = zero
        self.memory = memory
        self.dtype = precision.parameters
        self.reduce_dtype = precision.reduce
        self.overlaps = zero.overlap_comm is True
        self.slots: list[Parameter] = []
        self.leaves: list[Tensor] = []
        self.offsets: dict[int, int] = {}
        """Where a leaf begins in the flat parameter."""
        self.part = 0
        """Elements of a rank's part."""
        self.step_of: PartitionStep | None = None
        self._flat: Tensor | None = None
        self._main: Tensor | None = None
        self._is_last = True
        self._micro_batch = 0
        self._leaving: LeavingGradients | None = None
        self._buffers: list[Tensor] = []
        self._present = 0
        self._bucket: list[Tensor] = []
        self._filled = 0
        self._own: Tensor | None = None
        """Gradients of the parameters that lie in the own part, of this backward."""
        self._used_of_own = 0
        self._waits_for_end = False

    # -- set-up ------------------------------------------------------------------------------------------------
    def wrap(self, model: Module, blocks: Sequence[Module], outer: Sequence[Module]) -> None:
        self.slots += model.parameters()

    def start(self, parameters: list[Tensor], buffers: list[Tensor]) -> None:
        """Flatten the parameters, which become views, and copy the own part in fp32."""
        tape, begin = self.tape, 0
        trained = [slot for slot in self.slots if slot.requires_grad]
        elements = round_up(sum(slot.elements for slot in trained), ALIGNMENT * self.zero.degree)
        flat = self._flat = tape.empty((elements,), self.dtype, owner=Owner.PARAMETER)
        tape.recorder.memory_bound("aten::cat", "copy", 2 * flat.bytes)
        for slot in trained:
            leaf = flat.alias(slot.shape)
            leaf.requires_grad, leaf.post_hook = True, self._take
            self.offsets[id(leaf)] = begin
            begin += slot.elements
            self.leaves.append(leaf)
            slot.tensor = leaf
        parameters[:] = self.leaves
        self.part = elements // self.zero.degree
        if self.zero.offload_optimizer is not None:
            self._start_on_host()
            return
        clone = tape.empty((self.part,), self.dtype, owner=Owner.PARAMETER) if self.dtype != "fp32" else None
        self._main = tape.empty((self.part,), "fp32", owner=Owner.OPTIMIZER)
        tape.recorder.memory_bound("aten::copy_", "copy", 2 * self._main.bytes)
        del clone
        tape.scratch(self._main.bytes)

    def _start_on_host(self) -> None:
        """The own part leaves in 16 bit and is cast there."""
        clone = self.tape.empty((self.part,), self.dtype, owner=Owner.PARAMETER)
        recorder = self.tape.recorder
        recorder.copy(HostCopy("device_to_host", clone.bytes, pinned=False), COMPUTE)
        recorder.sync(recorder.record(COMPUTE))
        del clone
        largest = max(leaf.elements for leaf in self.leaves)
        self._leaving = LeavingGradients(self.tape, largest, self.dtype, self.memory)

    def make_optimizer(self, parameters: list[Tensor], setup: Optimizer) -> StepOptimizer:
        assert self._flat is not None
        if self._leaving is not None:
            return HostStep(self.tape, self.zero, [self.part], self.dtype, setup, self.memory, self._flat)
        assert self._main is not None
        self.step_of = PartitionStep(self.tape, [self._main], self._flat, self.zero.degree, setup)
        return self.step_of

    def begin(self, last: bool) -> None:
        self._micro_batch = 0 if self._is_last else self._micro_batch + 1
        self._is_last = last

    def clip(self, parameters: list[Tensor]) -> None:
        """Part of the step."""

    # -- in backward -------------------------------------------------------------------------------------------
    def _take(self, leaf: Tensor) -> None:
        """process_gradients."""
        if not self._buffers:
            size = (self.zero.reduce_bucket,)
            self._buffers = [self._reduction_buffer(size) for _ in range(2 if self.overlaps else 1)]
            self._present = 0
        if not self._waits_for_end:
            self._waits_for_end = True
            self.tape.final_callbacks.append(self._end_backward)
        if self.zero.stage == 2 or (self.overlaps and self._is_last):
            self._into_bucket(leaf)

    def _into_bucket(self, leaf: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: what is larger than a bucket is one by itself."""
        gradient = leaf.grad
        assert gradient is not None
        if self._filled + leaf.elements > self.zero.reduce_bucket:
            self._reduce()
            if self.overlaps:
                self._present = 1 - self._present
        if leaf.elements <= self.zero.reduce_bucket:
            self.tape.recorder.memory_bound("aten::copy_", "copy", 2 * gradient.bytes)
            leaf.grad = self._buffers[self._present].alias(leaf.shape)
        elif self._leaving is not None:
            leaf.grad = self.tape.copy(gradient)
        del gradient
        self._bucket.append(leaf)
        self._filled += leaf.elements

    def _end_backward(self) -> None:
        """independent_gradient_partition_epilogue."""
        self._waits_for_end = False
        if self.zero.stage == 1 and not self._is_last:
            return
        recorder = self.tape.recorder
        if self.zero.stage == 1 and not self.overlaps:
            for leaf in self.leaves:
                if leaf.grad is not None:
                    self._into_bucket(leaf)
        self._reduce()
        if self.overlaps:
            for stream in (DATA, COMPUTE):
                recorder.sync(recorder.record(stream))
        if self.step_of is not None:
            self.step_of.keep([g for leaf in self.leaves if (g := self._own_slice(leaf)) is not None])
        self._own, self._used_of_own = None, 0
        self._buffers.clear()
        for leaf in self.leaves:
            leaf.grad = None

    # -- a bucket ----------------------------------------------------------------------------------------------
    def _reduce(self) -> None:
        """reduce_ipg_grads: divide, sum over the ranks, keep what lies in the own part."""
        if not self._bucket:
            return
        recorder = self.tape.recorder
        recorder.operator(_REDUCE)
        stream = DATA if self.overlaps else COMPUTE
        if self.overlaps:
            recorder.stream_waits_stream(DATA, COMPUTE)
            recorder.stream_waits_stream(COMPUTE, DATA)
        recorder.memory_bound("aten::div_", "elementwise", 2 * ITEM_BYTES[self.dtype] * self._filled, stream)
        for slices in self._sums():
            self._all_reduce(slices, stream)
        for leaf in self._bucket:
            if self.offsets[id(leaf)] < self.part:
                self._keep(leaf, stream)
            elif self.zero.stage == 2:
                leaf.grad = None
        self._bucket.clear()
        self._filled = 0

    def _sums(self) -> Iterator[list[tuple[int, int]]]:
        """Slices (part, elements) of the bucket that are summed together: more are begun once a bucket is exceeded."""
        slices: list[tuple[int, int]] = []
        for leaf in self._bucket:
            for part, elements in self._parts(leaf):
                if slices and slices[-1][0] == part:
                    slices[-1] = part, slices[-1][1] + elements
                else:
                    slices.append((part, elements))
        together: list[tuple[int, int]] = []
        for piece in slices:
            together.append(piece)
            if sum(elements for _, elements in together) > self.zero.reduce_bucket:
                yield together
                together = []
        if together:
            yield together

    def _parts(self, leaf: Tensor) -> Iterator[tuple[int, int]]:
        """The ranks' parts in which a parameter lies, and how much of it."""
        begin = self.offsets[id(leaf)]
        end = begin + leaf.elements
        while begin < end:
            part = begin // self.part
            stop = min(end, (part + 1) * self.part)
            yield part, stop - begin
            begin = stop

    def _all_reduce(self, slices: list[tuple[int, int]], stream: int) -> None:
        """Slices of several ranks are flattened into a buffer first."""
        recorder = self.tape.recorder
        flat, cast, item = None, None, ITEM_BYTES[self.dtype]
        elements = sum(elements for _, elements in slices)
        if len(slices) > 1:
            flat = self.tape.empty((elements,), self.dtype, stream=stream, owner=Owner.REDUCE_SCATTER)
            recorder.memory_bound("aten::cat", "copy", 2 * flat.bytes, stream)
        if self.reduce_dtype != self.dtype:
            cast = self.tape.empty((elements,), self.reduce_dtype, stream=stream, owner=Owner.REDUCE_SCATTER)
            recorder.memory_bound("aten::copy_", "elementwise", cast.bytes + item * elements, stream)
        if self.zero.degree > 1:
            size_bytes = ITEM_BYTES[self.reduce_dtype] * elements
            recorder.collective(Collective("all_reduce", size_bytes, "dp", self.zero.degree, self.reduce_dtype), stream)
        own = sum(elements for part, elements in slices if not part)
        recorder.memory_bound("aten::copy_", "copy", 2 * item * own, stream)

    def _keep(self, leaf: Tensor, stream: int) -> None:
        """copy_grads_in_partition: parameters that only begin in the own part are kept whole."""
        if self._leaving is not None:
            own = min(leaf.elements, self.part - self.offsets[id(leaf)])
            self._leaving.leave(leaf, own, self._micro_batch if self.zero.stage == 2 else 0, self._is_last, stream)
            return
        gradient = leaf.grad
        assert gradient is not None
        if self._own is None:
            elements = sum(other.elements for other in self.leaves if self.offsets[id(other)] < self.part)
            self._own = self.tape.empty((elements,), gradient.dtype, stream=stream, owner=Owner.GRADIENT)
        self.tape.recorder.memory_bound("aten::copy_", "copy", 2 * gradient.bytes, stream)
        leaf.grad = self._own.alias(leaf.shape)

    def _own_slice(self, leaf: Tensor) -> Tensor | None:
        """The part of a gradient that the own part needs."""
        begin = self.offsets[id(leaf)]
        if begin >= self.part or leaf.grad is None:
            return None
        return leaf.grad.alias((min(leaf.elements, self.part - begin),))

    def _reduction_buffer(self, shape: tuple[int, ...]) -> Tensor:
        return self.tape.empty(shape, self.dtype, owner=Owner.REDUCE_SCATTER)

    def finish(self) -> None:
        for leaf in self.leaves:
            leaf.post_hook = None
