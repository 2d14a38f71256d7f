"""DeepSpeed's ZeRO-Offload: a rank's fp32 part, its gradients and moments in main memory, where the CPU steps them.

Gradients of the own part leave as they are reduced, on the stream of the reduction. The norm is taken on the GPU before
they leave; the CPU scales by it. Source: DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py; its own runs were recorded.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.program.kernels import ITEM_BYTES, Collective, HostCopy
from sim.program.program import COMPUTE, Owner
from sim.runtime.host_memory import HostMemory
from sim.runtime.optimizer import STEP_TENSORS, StepOptimizer, cpu_work
from sim.runtime.sharding.zero_drive import OptimizerDrive
from sim.runtime.sharding.zero_step import NORM_BYTES
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.parallel import Zero
from sim.scenario.setup import Optimizer

FP32 = ITEM_BYTES["fp32"]
NORM_PART = 250_000_000
"""Elements of a gradient whose norm stage 3 takes at a time."""


def leave_in_fp32(tape: Tape, elements: int, read_bytes: int) -> None:
    """Cast to fp32 on the current stream, and send that to the host."""
    cast = tape.empty((elements,), "fp32", owner=Owner.GRADIENT)
    tape.recorder.memory_bound("aten::copy_", "elementwise", read_bytes + cast.bytes)
    tape.recorder.copy(HostCopy("device_to_host", cast.bytes), tape.recorder.stream)


def norm_of(tape: Tape, elements: int, item_bytes: int, part: int | None = None) -> None:
    """The norm of a gradient in double precision, `part` elements at a time."""
    recorder, part = tape.recorder, part or elements
    for begin in range(0, elements, part):
        size = min(part, elements - begin)
        double = tape.empty((size,), "int64", owner=Owner.WORKSPACE)  # as large as fp64
        recorder.memory_bound("aten::copy_", "elementwise", size * item_bytes + double.bytes)
        recorder.memory_bound("aten::linalg_vector_norm", "reduce", size * NORM_BYTES)
        del double


class LeavingGradients:
    """Of stages 1 and 2. Gradients of earlier micro-batches wait in main memory; each further one fetches what is there,
    adds to it on the GPU, and sends it back."""

    def __init__(self, tape: Tape, largest: int, dtype: str, memory: HostMemory) -> None:
        self.tape = tape
        self.memory = memory
        self._fetched = tape.empty((largest,), dtype, owner=Owner.GRADIENT)
        """Room for the largest gradient that is fetched; it stays."""
        memory.take(self._fetched.bytes)
        self._waiting: set[int] = set()
        self._copied: int | None = None

    def leave(self, leaf: Tensor, own: int, micro_batch: int, last: bool, stream: int) -> None:
        """`own`: elements that belong to this rank's part."""
        with self.tape.recorder.on_stream(stream):
            if micro_batch or not last:
                self._accumulate(leaf, micro_batch)
            if last:
                self._leave(leaf, own)
            self._copied = self.tape.recorder.record(stream)

    def _accumulate(self, leaf: Tensor, micro_batch: int) -> None:
        recorder, gradient = self.tape.recorder, leaf.grad
        assert gradient is not None
        self.wait()
        if id(leaf) not in self._waiting:
            self._waiting.add(id(leaf))
            self.memory.take(gradient.bytes)
        if micro_batch:
            recorder.copy(HostCopy("host_to_device", gradient.bytes), recorder.stream)
            recorder.memory_bound("aten::add_", "elementwise", 3 * gradient.bytes)
        recorder.copy(HostCopy("device_to_host", gradient.bytes), recorder.stream)

    def _leave(self, leaf: Tensor, own: int) -> None:
        """Its norm, whether it overflows (for which the host waits), and the gradient itself in fp32."""
        tape, recorder, gradient = self.tape, self.tape.recorder, leaf.grad
        assert gradient is not None
        item = ITEM_BYTES[gradient.dtype]
        norm_of(tape, own, item)
        for name in ("aten::amax", "aten::amin"):
            recorder.memory_bound(name, "reduce", gradient.bytes)
        recorder.sync(recorder.record(recorder.stream))
        leave_in_fp32(tape, own, own * item)
        leaf.grad = None

    def wait(self) -> None:
        """The host waits until what has been sent is there."""
        if self._copied is not None:
            self.tape.recorder.sync(self._copied)
            self._copied = None


class HostStep(StepOptimizer):
    """The step on the CPU, sub-group by sub-group.

    `sizes`: elements of each sub-group's part. `before`, `after` the step something is called; without `after` all
    parameters are gathered from `flat`. Stage 3's fp32 part is pageable, stages 1 and 2 pin it.
    """

    def __init__(
        self, tape: Tape, zero: Zero, sizes: list[int], dtype: str, setup: Optimizer, memory: HostMemory,
        flat: Tensor | None = None, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(tape, [], setup.variant)
        self.zero = zero
        self.sizes = sizes
        self.dtype = dtype
        self.memory = memory
        self.flat = flat
        self.before = before
        self.after = after
        self.scales = zero.stage == 3 or setup.clip_norm is not None or dtype == "fp16"
        self.drive = OptimizerDrive(tape, zero, sizes) if zero.offload_optimizer == "nvme" else None
        self._has_state = False
        self._take_memory()

    def _take_memory(self) -> None:
        """The fp32 part and its gradients, and for what goes back pinned a copy in 16 bit. On drives only buffers."""
        if self.drive is not None:
            self.drive.take_buffers(self.memory)
            return
        item = ITEM_BYTES[self.dtype]
        for size in self.sizes:
            if self.zero.stage == 3:
                self.tape.recorder.host_memory(FP32 * size, FP32 * size)
            else:
                self.memory.take(FP32 * size)
                self.memory.take(item * size)
            self.memory.take(FP32 * size)

    def prepare(self) -> None:
        """Has any gradient overflown (stages 1 and 2)? The norms of all ranks, of which the host learns the sum."""
        recorder = self.tape.recorder
        if self.before is not None:
            self.before()
        recorder.sync(recorder.record(COMPUTE))
        for size_bytes, dtype in ((1, "bool"), (4, "fp32"))[self.zero.stage == 3 :]:
            if self.zero.degree > 1:
                recorder.collective(Collective("all_reduce", size_bytes, "dp", self.zero.degree, dtype), COMPUTE)
            recorder.sync(recorder.record(COMPUTE))

    def step(self) -> None:
        recorder = self.tape.recorder
        for number, size in enumerate(self.sizes):
            if self.drive is not None:
                self.drive.read(number)
            recorder.host("optimizer_loop")
            if not self._has_state and self.drive is None:
                recorder.host_memory(2 * FP32 * size, 2 * FP32 * size)  # pageable moments
            if self.scales:
                cpu_work(recorder, 2 * FP32 * size)
            cpu_work(recorder, STEP_TENSORS * FP32 * size)
            self._return(size)
            if self.drive is not None:
                self.drive.write(number)
        if self.drive is not None:
            self.drive.finish()
        self._has_state = True
        if self.after is not None:
            self.after()
        elif self.zero.degree > 1 and self.flat is not None:
            work = Collective("all_gather", self.flat.bytes, "dp", self.zero.degree, self.flat.dtype)
            recorder.collective(work, COMPUTE)

    def _return(self, size: int) -> None:
        """The CPU writes the part in 16 bit; unless parts stay on the host, it goes to the GPU."""
        recorder, item = self.tape.recorder, ITEM_BYTES[self.dtype]
        cpu_work(recorder, (FP32 + item) * size)
        if self.zero.offload_param is not None:
            return
        pinned = self.zero.stage < 3
        recorder.copy(HostCopy("host_to_device", item * size, pinned), COMPUTE)
        if not pinned:
            recorder.sync(recorder.record(COMPUTE))

    def zero_grad(self) -> None:
        """Gradients are gone already."""
