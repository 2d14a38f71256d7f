"""Offload that knows the pipeline (Kwai, Yuan et al., ATC 2024): what a stage saves for one micro-batch is one bundle.

A share of a bundle's bytes, in the order of saving, leaves on the device-to-host stream while the next micro-batch
computes, and its device bytes are freed once compute has waited for the copy, before the micro-batch after that. Behind
the backward before its own it comes back into one of two buffers that stay. A bundle whose backward follows at once
stays. A tensor that the share cuts in two leaves its rest as a copy, and is put together again. Parameters, buffers and
small tensors stay; so do outputs that are thrown away and made again. A stage's input is let go too: the graph begins
at an empty leaf. Source: kwai/Megatron-Kwai, core/pipeline_parallel/offload.py and schedules.py, read there; no
recording. Host memory is pinned in blocks of PyTorch's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from sim.model.calls import Shape
from sim.program.kernels import HostCopy
from sim.program.program import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Owner, Phase
from sim.runtime.autograd import Gradients, Node
from sim.runtime.host_memory import HostMemory
from sim.runtime.ops.base import Op
from sim.runtime.recorder import Operators
from sim.runtime.schedules import Action, Kind
from sim.runtime.scratch import round_up
from sim.runtime.streamed_offload import STAY
from sim.runtime.strides import Strides
from sim.runtime.tape import Tape
from sim.runtime.tensor import Storage, Tensor
from sim.scenario.setup import Offload

GRANULARITY_BYTES = 1 << 20
_OFFLOAD = Operators.number("pipeline::offload")


@dataclass(slots=True)
class _Buffer:
    """Device memory that bundles come back to; `users` of its tensors are still saved."""

    tensor: Tensor | None = None
    users: int = 0

    def of(self, tape: Tape, size_bytes: int) -> Tensor:
        """At least so large; a smaller one is given up first."""
        if self.tensor is not None and self.tensor.bytes < size_bytes:
            self.tensor = None
        if self.tensor is None:
            self.tensor = tape.empty((size_bytes,), "uint8", owner=Owner.ACTIVATION)
        return self.tensor


class _Saved:
    """Bytes that backward needs, whoever saved them."""

    __slots__ = ("buffer", "rest", "shape", "tensor", "uses")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.shape = tensor.shape, tensor.dtype
        self.rest: Tensor | None = None
        """What stays on the device of one that was cut."""
        self.buffer: _Buffer | None = None
        self.uses = 0

    def let_go(self) -> None:
        """One saved tensor less needs it."""
        self.uses -= 1
        if not self.uses:
            self.tensor = self.rest = None
            if self.buffer is not None:
                self.buffer.users -= 1
                self.buffer = None


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved tensor as a view of saved bytes; once its node has let it go, so does the bundle."""

    saved: _Saved
    shape: Shape
    dtype: str
    strides: Strides

    def __del__(self) -> None:
        self.saved.let_go()


class Bundle:
    """The saved-tensor hook of one micro-batch in one stage."""

    def __init__(self, above_bytes: int) -> None:
        self.above_bytes = above_bytes
        self.saved: list[_Saved] = []
        self._by_storage: dict[Any, _Saved] = {}
        self.whole: list[_Saved] = []
        self.cut: _Saved | None = None
        self.held: list[Tensor] = []  # until the copy has been waited for
        self.bytes = 0  # that left
        self.block = 0  # of host memory
        self.event = 0  # of the last copy
        self.buffer: _Buffer | None = None

    def pack(self, tensor: Tensor) -> _Packed | Tensor:
        storage = tensor.storage
        if storage.owner in STAY or tensor.bytes < self.above_bytes:
            return tensor
        key: Storage | object = storage if tensor.bytes == storage.bytes else object()
        saved = self._by_storage.get(key)
        if saved is None:
            saved = self._by_storage[key] = _Saved(tensor.detach())
            self.saved.append(saved)
        saved.uses += 1
        return _Packed(saved, tensor.shape, tensor.dtype, tensor.strides)

    def unpack(self, packed: _Packed | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        held = packed.saved.tensor
        assert held is not None, "a bundle is fetched before its backward"
        return Tensor(held.storage, packed.shape, packed.dtype, packed.strides)

    def split(self, share: float) -> None:
        """Which tensors leave whole, and which is cut; `bytes` of all that leave, in whole MiB."""
        self._by_storage.clear()
        there = [s for s in self.saved if s.tensor is not None and s.tensor.storage.handle is not None]
        self.saved = []
        begin, total = 0, sum(s.tensor.bytes for s in there if s.tensor is not None)
        self.bytes = round_up(ceil(total * share), GRANULARITY_BYTES)
        for saved in there:
            assert saved.tensor is not None
            end = begin + saved.tensor.bytes
            if end <= self.bytes:
                self.whole.append(saved)
            elif begin < self.bytes:
                self.cut = saved
                self.held.append(saved.tensor)
            begin = end
        self.held += [saved.tensor for saved in self.whole if saved.tensor is not None]


class StageOffload:
    """The bundles of one pipeline rank. `order`: what it computes, in order."""

    def __init__(self, tape: Tape, offload: Offload, order: Sequence[Action]) -> None:
        self.tape = tape
        self.order = order
        self.share = offload.share
        self.above_bytes = offload.above_bytes
        self.memory = HostMemory(tape.recorder, offload.pinned, offload.pinned_pool)
        self.buffers = [_Buffer(), _Buffer()]
        self.bundles: dict[tuple[int, int], Bundle] = {}
        self.leaving: Bundle | None = None
        self.coming: Bundle | None = None

    @contextmanager
    def saving(self, action: Action) -> Iterator[None]:
        """What is saved inside belongs to the bundle of this forward."""
        bundle = self.bundles[action.stage, action.micro_batch] = Bundle(self.above_bytes)
        self.tape.hooks.append(bundle)
        try:
            yield
        finally:
            self.tape.hooks.pop()

    def before(self, place: int) -> None:
        """The action at `place` is next: what moved is waited for, and other bundles set out. Between a backward and the
        forward behind it copies go on."""
        action, previous = self.order[place], self.order[place - 1] if place else None
        begins = action.kind is Kind.BACKWARD
        if not begins and (previous is None or previous.kind is Kind.BACKWARD):
            return
        phase = Phase.BACKWARD if begins else Phase.FORWARD
        with self.tape.phase(phase, Owner.ACTIVATION):
            self.tape.recorder.operator(_OFFLOAD)
            if begins:
                self._arrive(self.bundles.pop((action.stage, action.micro_batch)))
            self._left()
            if previous is not None and previous.kind is Kind.FORWARD and previous[::2] != action[::2]:
                self._leave(self.bundles[previous.stage, previous.micro_batch])
            following = self._next_backward(self.order[place + 1 : place + (3 if begins else 2)])
            if following is not None and following.bytes:
                self._come(following)

    def _next_backward(self, actions: Sequence[Action]) -> Bundle | None:
        """The bundle of the first backward among these, if its forward has been."""
        for action in actions:
            if action.kind is Kind.BACKWARD:
                return self.bundles.get((action.stage, action.micro_batch))
        return None

    # -- out ---------------------------------------------------------------------------------------------------
    def _leave(self, bundle: Bundle) -> None:
        recorder = self.tape.recorder
        bundle.split(self.share)
        if not bundle.bytes:
            return
        bundle.block = self.memory.take(bundle.bytes)
        left = bundle.bytes
        copies = [saved.tensor.bytes for saved in bundle.whole if saved.tensor is not None]
        if bundle.cut is not None and bundle.cut.tensor is not None:
            part = left - sum(copies)
            rest = bundle.cut.tensor.bytes - part
            bundle.cut.rest = self.tape.pointwise("aten::clone", (rest,), "uint8", None, rest, "copy")
            copies.append(part)
        recorder.stream_waits_stream(DEVICE_TO_HOST, COMPUTE)
        for size_bytes in copies:
            recorder.copy(HostCopy("device_to_host", size_bytes), DEVICE_TO_HOST)
        bundle.event = recorder.record(DEVICE_TO_HOST)
        for saved in (*bundle.whole, *filter(None, (bundle.cut,))):
            saved.tensor = None
        self.leaving = bundle

    def _left(self) -> None:
        """The device bytes of what was leaving are freed once compute has waited for the copy."""
        if self.leaving is not None:
            self.tape.recorder.wait(COMPUTE, self.leaving.event)
            self.leaving.held.clear()
            self.leaving = None

    # -- back --------------------------------------------------------------------------------------------------
    def _come(self, bundle: Bundle) -> None:
        recorder = self.tape.recorder
        free = next((buffer for buffer in self.buffers if not buffer.users), None)
        if free is None:
            free = _Buffer()
            self.buffers.append(free)
        bundle.buffer = free
        free.of(self.tape, bundle.bytes)
        recorder.stream_waits_stream(HOST_TO_DEVICE, COMPUTE)
        recorder.wait(HOST_TO_DEVICE, bundle.event)
        recorder.copy(HostCopy("host_to_device", bundle.bytes), HOST_TO_DEVICE)
        bundle.event = recorder.record(HOST_TO_DEVICE)
        self.coming = bundle

    def _arrive(self, bundle: Bundle) -> None:
        """Its backward begins: whole tensors are views of the buffer, a cut one is put together."""
        if not bundle.bytes:
            return
        if self.coming is not bundle:
            self._come(bundle)
        self.coming = None
        tape, buffer = self.tape, bundle.buffer
        assert buffer is not None and buffer.tensor is not None
        tape.recorder.wait(COMPUTE, bundle.event)
        self.memory.give(bundle.block)
        for saved in bundle.whole:
            if saved.uses:
                saved.tensor = Tensor(buffer.tensor.storage, *saved.shape)
                saved.buffer = buffer
                buffer.users += 1
        cut = bundle.cut
        if cut is not None and cut.uses:
            cut.tensor = tape.empty(*cut.shape)
            tape.recorder.memory_bound("aten::copy_", "copy", 2 * cut.tensor.bytes)
            cut.rest = None


class _PassOn(Op):
    """ForwardLeftBackwardRight: the left goes on, the gradient goes to the right."""

    node = "ForwardLeftBackwardRightFunctionBackward"

    @staticmethod
    def forward(tape: Tape, given: Tensor, leaf: Tensor) -> Tensor:
        return given.detach()

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [None, gradients[0]]


def without_input(tape: Tape, received: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf of one element (expanded) that takes the gradient, and what the stage is given in its place."""
    one = tape.empty((1,), received.dtype, owner=Owner.ACTIVATION)
    leaf = Tensor(one.storage, received.shape, received.dtype)
    leaf.requires_grad = True
    return leaf, tape.apply(_PassOn, (received, leaf))
