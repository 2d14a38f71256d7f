"""Offload on streams of its own, as trainers do it (torchtune's OffloadActivations, TransformerEngine's cpu_offload).

A saved tensor leaves on the device-to-host stream behind the work that made it, and its device bytes are freed once the
compute stream has waited for the copy, which happens when `in_flight` later tensors want to leave. Before backward
enters a layer, that layer's tensors and those of the next `look_ahead` layers are fetched on the host-to-device stream;
they are freed there once the compute stream has used them. A tensor whose copy is still in flight when backward asks
for it is taken as it is. Parameters, views of them and buffers stay on the device.

Or both ways bytes are freed by record_stream: those that leave as soon as the copy is issued, those that are back with
their last use. Nothing waits then, and the allocator keeps the bytes until it has seen the other stream pass.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod
from typing import Any

from sim.model.calls import Shape
from sim.program.kernels import ITEM_BYTES, HostCopy
from sim.program.program import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Owner
from sim.runtime.autograd import Gradients
from sim.runtime.host_memory import HostMemory
from sim.runtime.offload import OnHost
from sim.runtime.strides import Strides
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Storage, Tensor
from sim.scenario.setup import Offload

STAY = (Owner.PARAMETER, Owner.GATHERED, Owner.OTHER)
"""Parameters, gathered parameters, buffers and data."""


class _Fetched(Storage):
    """Bytes that came back on the copy stream: they may be reused there once the compute stream is through with them."""

    __slots__ = ()

    def drop(self) -> None:
        if self.handle is not None:
            self.recorder.stream_waits_stream(HOST_TO_DEVICE, COMPUTE)
        super().drop()


class _Leaving:
    """One tensor on its way out and back."""

    __slots__ = ("event", "fetched", "on_device", "on_host", "uses")

    def __init__(self, on_device: Tensor | None, on_host: OnHost, event: int) -> None:
        self.on_device = on_device  # until the copy has been waited for
        self.on_host: OnHost | None = on_host
        self.event = event  # of the last copy
        self.fetched: Tensor | None = None
        self.uses = 0

    def let_go(self) -> None:
        """One saved tensor less needs it."""
        self.uses -= 1
        if not self.uses:
            self.on_device = self.on_host = self.fetched = None

    @property
    def is_away(self) -> bool:
        """Only the host has it."""
        return self.on_device is None and self.on_host is not None


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved tensor as a view of what leaves. Once its node has let all of them go, so does the layer."""

    leaving: _Leaving
    shape: Shape
    dtype: str
    strides: Strides

    def __del__(self) -> None:
        self.leaving.let_go()


class Streams:
    """What the layers of one model share: the copies in flight, and the order of layers in forward."""

    def __init__(self, tape: Tape, offload: Offload) -> None:
        self.tape = tape
        self.memory = HostMemory(tape.recorder, offload.pinned, offload.pinned_pool)
        self.look_ahead = offload.look_ahead
        self.in_flight = offload.in_flight
        self.records_streams = offload.release == "record_stream"
        self.above_bytes = offload.above_bytes
        self.leaving: deque[_Leaving] = deque()
        self.last: LayerHook | None = None

    def make_room(self) -> None:
        """Free the oldest tensors whose copies are in flight, so that one more may leave."""
        while len(self.leaving) >= self.in_flight:
            oldest = self.leaving.popleft()
            if oldest.on_device is not None:
                self.tape.recorder.wait(COMPUTE, oldest.event)
                oldest.on_device = None


class LayerHook:
    """The saved-tensor hook of one layer in one forward pass."""

    def __init__(self, streams: Streams, first: bool) -> None:
        self.streams = streams
        self.previous = None if first else streams.last
        self.entries: dict[Any, _Leaving] = {}

    # -- forward -----------------------------------------------------------------------------------------------
    def pack(self, tensor: Tensor) -> _Packed | Tensor:
        storage = tensor.storage
        if storage.owner in STAY or tensor.bytes < max(self.streams.above_bytes, 1):
            return tensor
        whole = tensor.bytes == storage.bytes
        key = storage.handle if whole else object()  # a part of a storage may be any part: it leaves by itself
        leaving = self.entries.get(key)
        if leaving is None:
            leaving = self.entries[key] = self._leave(tensor)
        leaving.uses += 1
        strides = tensor.strides if whole else strides_like(tensor)
        return _Packed(leaving, tensor.shape, tensor.dtype, strides)

    def _leave(self, tensor: Tensor) -> _Leaving:
        streams, tape = self.streams, self.streams.tape
        recorder, memory = tape.recorder, self.streams.memory
        streams.make_room()
        if tensor.bytes != tensor.storage.bytes and tensor.strides != strides_like(tensor):
            tensor = tape.copy(tensor)  # scattered: gathered into a buffer first
        block, owner = memory.take(tensor.bytes), tensor.storage.owner
        on_host = OnHost(memory, block, tensor.shape, tensor.dtype, None, owner)
        recorder.stream_waits_stream(DEVICE_TO_HOST, COMPUTE)
        recorder.copy(HostCopy("device_to_host", tensor.bytes), DEVICE_TO_HOST)
        event = recorder.record(DEVICE_TO_HOST)
        if streams.records_streams:
            tensor.storage.used_by(DEVICE_TO_HOST)
            return _Leaving(None, on_host, event)
        leaving = _Leaving(tensor.detach(), on_host, event)
        streams.leaving.append(leaving)
        return leaving

    # -- backward ----------------------------------------------------------------------------------------------
    def before_backward(self, gradients: Gradients) -> None:
        """Backward is about to enter the layer: fetch it, then the layers that come next, not before compute gets here
        (the host runs ahead of it)."""
        away: list[_Leaving] = []
        layer: LayerHook | None = self
        for _ in range(self.streams.look_ahead + 1 if self.streams.look_ahead else 0):
            if layer is not None:
                away += [leaving for leaving in reversed(layer.entries.values()) if leaving.is_away]
                layer = layer.previous
        if away:
            self.streams.tape.recorder.stream_waits_stream(HOST_TO_DEVICE, COMPUTE)
        for leaving in away:
            self._fetch(leaving)

    def _fetch(self, leaving: _Leaving) -> None:
        recorder, away = self.streams.tape.recorder, leaving.on_host
        assert away is not None
        recorder.wait(HOST_TO_DEVICE, leaving.event)
        size_bytes = prod(away.shape) * ITEM_BYTES[away.dtype]
        kind = Storage if self.streams.records_streams else _Fetched
        leaving.fetched = Tensor(kind(recorder, size_bytes, HOST_TO_DEVICE, away.owner), away.shape, away.dtype)
        recorder.copy(HostCopy("host_to_device", size_bytes), HOST_TO_DEVICE)
        leaving.event = recorder.record(HOST_TO_DEVICE)
        leaving.on_host = None

    def unpack(self, packed: _Packed | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        leaving = packed.leaving
        if leaving.is_away:
            self._fetch(leaving)
        held = leaving.on_device
        if held is None:
            held = leaving.fetched
            self.streams.tape.recorder.wait(COMPUTE, leaving.event)
        assert held is not None
        if self.streams.records_streams:
            held.storage.used_by(COMPUTE)
        tensor = Tensor(held.storage, packed.shape, packed.dtype, packed.strides)
        return tensor
