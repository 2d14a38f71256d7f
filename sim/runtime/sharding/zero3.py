"""DeepSpeed's ZeRO stage 3: parameters, gradients and optimizer states are split over the ranks, parameter by parameter.

Every module gathers its own parameters (zero3_parameters.py), and those of its parts that its own forward reads.
Gradients are copied into a bucket; a full one is reduce-scattered, and each rank keeps its part of every gradient in a
buffer that stays.
Source: DeepSpeed 0.19.8, runtime/zero/stage3.py and parameter_offload.py, read there; peaks of recorded runs are met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from sim.model.module import Module, ModuleList, Parameter
from sim.program.kernels import ITEM_BYTES, Collective, HostCopy
from sim.program.program import COMPUTE, REDUCE_SCATTER, Owner
from sim.runtime.autograd import Gradients, Node
from sim.runtime.host_memory import HostMemory
from sim.runtime.ops.base import Op
from sim.runtime.optimizer import StepOptimizer
from sim.runtime.recorder import Operators
from sim.runtime.sharding.family import Family
from sim.runtime.sharding.zero3_parameters import Coordinator, Partitioned
from sim.runtime.sharding.zero_drive import PartDrive
from sim.runtime.sharding.zero_host import NORM_PART, HostStep, leave_in_fp32, norm_of
from sim.runtime.sharding.zero_step import PartitionStep
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.parallel import Zero
from sim.scenario.setup import Optimizer, Precision

MOST_REDUCTIONS = 2
"""Reductions that may be unfinished before the host waits for the oldest (max_param_reduce_events)."""
_REDUCE = Operators.number("zero::reduce_scatter")


class _AfterBackward(Op):
    """An identity over a module's inputs; its backward comes after the module's."""

    node = "PostBackwardFunctionModuleBackward"

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(x.alias(x.shape, x.strides) for x in arguments if isinstance(x, Tensor))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        coordinator, module = node.attributes
        coordinator.release(module)
        return list(gradients)


class _Hooks:
    """Around the forward and the backward of every module."""

    def __init__(self, family: ZeroParameters, is_root: bool) -> None:
        self.family = family
        self.is_root = is_root

    def pre_forward(self, module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        tape, coordinator = self.family.tape, self.family.coordinator
        if self.is_root and not tape.engine_running:
            coordinator.begin_pass()
        coordinator.fetch(module)
        tracked = tuple(a for a in arguments if isinstance(a, Tensor) and a.requires_grad)
        if not tape.grad_enabled or not tracked or not coordinator.own[id(module)]:
            return arguments
        passed = iter(tape.apply_tuple(_AfterBackward, tracked, coordinator, module))
        return tuple(next(passed) if isinstance(a, Tensor) and a.requires_grad else a for a in arguments)

    def post_forward(self, module: Module, output: Any) -> Any:
        coordinator = self.family.coordinator
        coordinator.release(module)

        def before_backward(gradients: Gradients) -> None:
            coordinator.fetch(module)

        for tensor in output if isinstance(output, tuple) else (output,):
            if self.family.tape.grad_enabled and tensor.node is not None:
                tensor.node.pre_hooks = [*(tensor.node.pre_hooks or []), before_backward]
        return output


class ZeroParameters(Family):
    """The family."""

    def __init__(self, tape: Tape, zero: Zero, precision: Precision, memory: HostMemory) -> None:
        super().__init__(tape)
        self.zero = zero
        self.memory = memory
        self.dtype = precision.parameters
        self.reduce_dtype = precision.reduce
        self.modules: list[Module] = []
        self.parameters: list[Partitioned] = []
        self.coordinator: Coordinator
        self.stream = COMPUTE if zero.overlap_comm is False else REDUCE_SCATTER
        self.step_of: PartitionStep | None = None
        self.host_step: HostStep | None = None
        """With `zero.offload_optimizer`, in its place."""
        self._is_last = True
        self._micro_batch = 0
        self._mains: list[Tensor] = []
        self._groups: list[list[Partitioned]] = []
        """Parameters whose parts are stepped together."""
        self._parts: Tensor | None = None
        self._buffer: Tensor | None = None
        self._gradients: Tensor | None = None
        self._bucket: list[Partitioned] = []
        self._filled = 0
        self._events: deque[int] = deque()
        self._waits_for_end = False

    # -- set-up ------------------------------------------------------------------------------------------------
    def wrap(self, model: Module, blocks: Sequence[Module], outer: Sequence[Module]) -> None:
        self.modules = list(_modules(model))
        for module in self.modules:
            module.hooks = _Hooks(self, module is model)

    def place(self) -> list[Tensor]:
        """The parts in 16 bit, then in fp32; a bucket; the parts of the gradients. (Never a whole model: zero.Init.)"""
        tape = self.tape
        by_slot: dict[int, Partitioned] = {}
        own: dict[int, list[Partitioned]] = {}
        for module in self.modules:
            slots: list[Parameter] = [slot for _, slot in module.own_parameters()]
            for slot in slots:
                if id(slot) not in by_slot:
                    by_slot[id(slot)] = Partitioned(tape, slot, self.dtype, self.zero, len(by_slot))
            own[id(module)] = [by_slot[id(slot)] for slot in slots]
        for module in self.modules:
            own[id(module)] += [by_slot[id(slot)] for slot in module.external_parameters()]
        self.parameters = list(by_slot.values())
        self.coordinator = Coordinator(tape, self.zero, self.dtype, own)
        elements = (sum(p.part for p in self.parameters),)
        self._groups = list(self._sub_groups())
        if self.zero.offload_param is None:
            self._parts = tape.empty(elements, self.dtype, owner=Owner.PARAMETER)
        else:
            self._place_on_host()
        on_host = self.zero.offload_optimizer is not None
        if on_host:
            self.memory.take(elements[0] * ITEM_BYTES[self.dtype])  # the parts of the gradients
        else:
            self._place_mains()
        self._buffer = tape.empty((self.zero.reduce_bucket,), self.dtype, owner=Owner.REDUCE_SCATTER)
        if not on_host:
            self._gradients = tape.empty(elements, self.dtype, owner=Owner.GRADIENT)
        for p in self.parameters:
            p.leaf.post_hook = self._take
        self._by_leaf = {id(p.leaf): p for p in self.parameters}
        return [p.leaf for p in self.parameters]

    def _place_mains(self) -> None:
        for group in self._groups:
            size = (sum(p.part for p in group),)
            copy = self.tape.empty(size, "fp32", owner=Owner.OPTIMIZER)
            self._mains.append(self.tape.empty(size, "fp32", owner=Owner.OPTIMIZER))
            del copy
        self.tape.scratch(self._mains[0].bytes)

    def _place_on_host(self) -> None:
        """The 16-bit parts, in one pinned block; of those on drives as much as stays in main memory, and buffers."""
        elements, item_bytes = sum(p.part for p in self.parameters), ITEM_BYTES[self.dtype]
        if self.zero.offload_param == "nvme":
            drive = self.coordinator.drive = PartDrive(self.tape, self._groups, item_bytes, self.memory)
            elements = drive.in_memory
        self.memory.take(elements * item_bytes)

    def _sub_groups(self) -> Iterator[list[Partitioned]]:
        """A sub-group is closed once its parts have `sub_group` elements."""
        group: list[Partitioned] = []
        for p in self.parameters:
            group.append(p)
            if sum(q.part for q in group) >= self.zero.sub_group:
                yield group
                group = []
        if group:
            yield group

    def make_optimizer(self, parameters: list[Tensor], setup: Optimizer) -> StepOptimizer:
        if self.zero.offload_optimizer is not None:
            parts = [sum(p.part for p in group) for group in self._groups]
            self.host_step = HostStep(
                self.tape, self.zero, parts, self.dtype, setup, self.memory,
                before=self.coordinator.drop_persistent, after=self._after_host_step,
            )  # fmt: skip
            return self.host_step
        assert self._parts is not None
        sizes = [len(group) for group in self._groups]
        self.step_of = PartitionStep(
            self.tape, self._mains, self._parts, self.zero.degree, setup, sizes,
            self.coordinator.drop_persistent, self.coordinator.gather_persistent,
        )  # fmt: skip
        return self.step_of

    def _after_host_step(self) -> None:
        """Parts on drives are written; small parameters are gathered."""
        if self.coordinator.drive is not None:
            self.coordinator.drive.write()
        self.coordinator.gather_persistent()

    def begin(self, last: bool) -> None:
        """Every micro-batch is reduced, but gradients leave in fp32 after the last."""
        self._micro_batch = 0 if self._is_last else self._micro_batch + 1
        self._is_last = last

    def clip(self, parameters: list[Tensor]) -> None:
        """Part of the step."""

    # -- in backward -------------------------------------------------------------------------------------------
    def _take(self, leaf: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads."""
        recorder, gradient = self.tape.recorder, leaf.grad
        assert gradient is not None and self._buffer is not None
        if not self._waits_for_end:
            self._waits_for_end = True
            self.tape.final_callbacks.append(self._end_backward)
        if self._bucket and self._filled + leaf.elements > self.zero.reduce_bucket:
            self._reduce()
        recorder.operator(_REDUCE)
        if self.stream != COMPUTE:
            recorder.stream_waits_stream(self.stream, COMPUTE)
        if self._filled + leaf.elements <= self.zero.reduce_bucket:
            recorder.memory_bound("aten::copy_", "copy", 2 * gradient.bytes, self.stream)
            gradient.storage.used_by(self.stream)
            leaf.grad = self._buffer.alias(leaf.shape)
        self._bucket.append(self._by_leaf[id(leaf)])
        self._filled += leaf.elements

    def _reduce(self) -> None:
        """__reduce_and_partition_ipg_grads: flatten by rank, reduce-scatter, keep this rank's parts."""
        tape, recorder, ranks = self.tape, self.tape.recorder, self.zero.degree
        recorder.operator(_REDUCE)
        if len(self._events) > MOST_REDUCTIONS:
            recorder.sync(self._events.popleft())
        elements = sum(p.part for p in self._bucket) * ranks
        size_bytes = elements * ITEM_BYTES[self.reduce_dtype]
        flat = None
        if len(self._bucket) > 1 or self.reduce_dtype != self.dtype or elements != self._filled:
            flat = tape.empty((elements,), self.reduce_dtype, stream=self.stream, owner=Owner.REDUCE_SCATTER)
            recorder.memory_bound("aten::cat", "copy", 2 * flat.bytes, self.stream)
        recorder.memory_bound("aten::div_", "elementwise", 2 * size_bytes, self.stream)
        if ranks > 1:
            work = Collective("reduce_scatter", size_bytes, "dp", ranks, self.reduce_dtype)
            recorder.collective(work, self.stream)
        if self.zero.offload_optimizer is None:
            adds = self.step_of is not None and self.step_of.keeps
            kept = size_bytes // ranks * (3 if adds else 2)
            recorder.memory_bound("aten::add_" if adds else "aten::copy_", "copy", kept, self.stream)
        for p in sorted(self._bucket, key=lambda p: p.number):
            if self.zero.offload_optimizer is not None:
                self._leave(p)
            if p.leaf.grad is not None:
                p.leaf.grad.storage.used_by(self.stream)
            p.leaf.grad = None
        del flat
        self._bucket.clear()
        self._filled = 0
        self._events.append(recorder.record(self.stream))

    def _leave(self, p: Partitioned) -> None:
        """partition_grads: the own part goes into the host's buffer and comes back, or what is there is fetched and added
        to; after the last micro-batch its norm is taken, and it leaves in fp32."""
        recorder, size_bytes = self.tape.recorder, p.part * ITEM_BYTES[self.dtype]
        with recorder.on_stream(self.stream):
            if not self._micro_batch:
                recorder.copy(HostCopy("device_to_host", size_bytes), self.stream)
            part = self.tape.empty((p.part,), self.dtype, owner=Owner.GRADIENT)
            recorder.copy(HostCopy("host_to_device", size_bytes), self.stream)
            if self._micro_batch:
                recorder.memory_bound("aten::add_", "elementwise", 3 * size_bytes)
                recorder.copy(HostCopy("device_to_host", size_bytes), self.stream)
            if not self._is_last:
                return
            norm_of(self.tape, p.part, ITEM_BYTES[self.dtype], NORM_PART)
            leave_in_fp32(self.tape, p.part, part.bytes)
            if self.host_step is not None and self.host_step.drive is not None:
                self.host_step.drive.gradient(p.part * ITEM_BYTES["fp32"], self.stream)

    def _end_backward(self) -> None:
        self._waits_for_end = False
        if self._bucket:
            self._reduce()
        self.coordinator.release_all()
        if self.stream != COMPUTE:
            self.tape.recorder.stream_waits_stream(COMPUTE, self.stream)
        if self._gradients is None:
            self.tape.recorder.sync(self.tape.recorder.record(self.stream))
            return
        if self.step_of is not None and not self.step_of.keeps:
            self.step_of.keep([self._gradients.alias((p.part,)) for p in self.parameters])

    def finish(self) -> None:
        for module in self.modules:
            module.hooks = None
        for p in self.parameters:
            p.leaf.post_hook = None


def _modules(module: Module) -> Iterator[Module]:
    """A module and all that are in it, but for lists, which are never called."""
    if not isinstance(module, ModuleList):
        yield module
    for _, child in module.children():
        yield from _modules(child)
