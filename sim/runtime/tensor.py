"""Tensors without values: storages with a reference count, handles on them, and the leaf that collects a gradient."""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING

from sim.model.calls import Shape
from sim.model.calls import Tensor as ModelTensor
from sim.program.kernels import packed_bytes
from sim.runtime.strides import Strides

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.runtime.autograd import AccumulateGrad, Node
    from sim.runtime.recorder import Recorder


class Storage:
    """Bytes on the device. `handles` counts the tensors on it; the bytes die with the last one.

    The object outlives its bytes where FSDP resizes it to 0 and back (`drop`, `fill`).
    """

    __slots__ = ("bytes", "handle", "handles", "owner", "recorder", "stream")

    def __init__(self, recorder: Recorder, size_bytes: int, stream: int, owner: int) -> None:
        self.recorder = recorder
        self.bytes = size_bytes
        self.stream = stream
        self.owner = owner
        self.handles = 0
        self.handle: int | None = None
        self.handle = recorder.alloc(size_bytes, stream, owner) if size_bytes else None

    @classmethod
    def adopt(cls, recorder: Recorder, handle: int) -> Storage:
        """The storage of an allocation that is recorded already."""
        storage = cls.__new__(cls)
        storage.recorder = recorder
        storage.bytes, storage.stream, storage.owner = recorder.allocation(handle)
        storage.handles = 0
        storage.handle = handle
        return storage

    def drop(self) -> None:
        """storage.resize_(0)."""
        if self.handle is not None:
            self.recorder.free(self.handle)
            self.handle = None

    def fill(self) -> None:
        """storage.resize_(full size)."""
        if self.handle is None:
            self.handle = self.recorder.alloc(self.bytes, self.stream, self.owner)

    def used_by(self, stream: int) -> None:
        """tensor.record_stream(stream); nothing if it is the bytes' own."""
        if self.handle is not None and stream != self.stream:
            self.recorder.record_stream(self.handle, stream)

    def belongs_to(self, owner: int) -> None:
        """Name the owner of these bytes, from their allocation on."""
        self.owner = owner
        if self.handle is not None:
            self.recorder.owners[self.handle] = owner


class Tensor(ModelTensor):
    """A handle on a storage. A view holds its base, so the storage of a viewed tensor has at least two handles."""

    __slots__ = (
        "__weakref__", "accumulator", "after_accumulate", "base", "dtype", "grad", "node", "output_index", "post_hook",
        "requires_grad", "shape", "storage", "strides",
    )  # fmt: skip

    def __init__(
        self, storage: Storage, shape: Shape, dtype: str, strides: Strides = None, base: Tensor | None = None
    ) -> None:
        self.storage = storage
        storage.handles += 1
        self.shape = shape
        self.dtype = dtype
        self.strides = strides
        self.base = base
        self.node: Node | None = None
        self.output_index = 0
        self.requires_grad = False
        self.grad: Tensor | None = None
        self.accumulator: weakref.ref[AccumulateGrad] | None = None
        self.after_accumulate: Callable[[Tensor], None] | None = None
        self.post_hook: Callable[[Tensor], None] | None = None
        """The same, with the incoming gradient still alive: a hook on the accumulator itself (DDP, FSDP1)."""

    def __del__(self) -> None:
        storage = self.storage
        storage.handles -= 1
        if not storage.handles:
            storage.drop()

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Elements times item size: what a kernel that reads the tensor moves."""
        return packed_bytes(prod(self.shape), self.dtype)

    def detach(self) -> Tensor:
        """A second handle on the same bytes, outside the graph."""
        return Tensor(self.storage, self.shape, self.dtype, self.strides)

    @staticmethod
    def of(tensor: ModelTensor) -> Tensor:
        """The tape's view of a model's handle (all handles are the tape's own)."""
        assert isinstance(tensor, Tensor)
        return tensor

    def alias(self, shape: Shape, strides: Strides = None, dtype: str | None = None) -> Tensor:
        """A raw view: no graph, holds the base."""
        base = self.base if self.base is not None else self
        return Tensor(self.storage, shape, dtype or self.dtype, strides, base)
