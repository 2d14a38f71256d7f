"""torch.autograd.graph.save_on_cpu: saved tensors go to host memory and come back when needed.

TAPE_LLAMA_FSDP.md 2.3: a tensor that is not in plain order first gets a contiguous device copy that dies at once; what
comes back is a new contiguous tensor each time. Pageable memory (pin_memory=False) keeps the order of a dense tensor,
since tensor.cpu() does.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.model.calls import Shape
from sim.program.kernels import HostCopy
from sim.program.program import COMPUTE
from sim.runtime.host_memory import HostMemory
from sim.runtime.strides import Strides
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


@dataclass(slots=True)
class OnHost:
    """A tensor in host memory; its block is given back when nobody holds it any more."""

    memory: HostMemory
    block: int
    shape: Shape
    dtype: str
    strides: Strides
    owner: int

    def __del__(self) -> None:
        self.memory.give(self.block)


class SaveOnCpu:
    """The hook. Copies run on the compute stream, without prefetch.

    Going out, the host waits for the copy (copy_ into the host tensor); coming back it does not if the memory is pinned
    (to(non_blocking=pin_memory)). Source: torch/autograd/graph.py.
    """

    def __init__(self, tape: Tape, memory: HostMemory) -> None:
        self.tape = tape
        self.memory = memory

    def pack(self, tensor: Tensor) -> OnHost:
        kept = None if self.memory.pinned else strides_like(tensor)
        if tensor.strides != kept:
            self.tape.copy(tensor)
        block = self.memory.take(tensor.bytes)
        self._copy(HostCopy("device_to_host", tensor.bytes, self.memory.pinned), waits=True)
        return OnHost(self.memory, block, tensor.shape, tensor.dtype, kept, tensor.storage.owner)

    def unpack(self, packed: OnHost) -> Tensor:
        tensor = self.tape.empty(packed.shape, packed.dtype, packed.strides, owner=packed.owner)
        self._copy(HostCopy("host_to_device", tensor.bytes, self.memory.pinned), waits=not self.memory.pinned)
        return tensor

    def _copy(self, copy: HostCopy, waits: bool) -> None:
        recorder = self.tape.recorder
        recorder.copy(copy, COMPUTE)
        if waits and copy.bytes:
            recorder.sync(recorder.record(COMPUTE))
