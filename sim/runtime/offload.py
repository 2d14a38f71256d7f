"""torch.autograd.graph.save_on_cpu(pin_memory=True): saved tensors go to host memory and come back when needed.

TAPE_LLAMA_FSDP.md 2.3: a tensor that is not in plain order first gets a contiguous device copy that dies at once; what
comes back is a new contiguous tensor each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.model.calls import Shape
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class _OnHost:
    shape: Shape
    dtype: str


class SaveOnCpu:
    """The hook. Copies run on the compute stream: synchronous, no prefetch."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def pack(self, tensor: Tensor) -> _OnHost:
        if tensor.strides is not None:
            self.tape.copy(tensor)
        self.tape.recorder.memory_bound("Memcpy DtoH (Device -> Pinned)", "copy_to_host", tensor.bytes)
        return _OnHost(tensor.shape, tensor.dtype)

    def unpack(self, packed: _OnHost) -> Tensor:
        tape = self.tape
        return tape.pointwise("Memcpy HtoD (Pinned -> Device)", packed.shape, packed.dtype, None, 0, "copy_from_host")
