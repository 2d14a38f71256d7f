"""Host memory for what the GPU does not hold: who takes it, what pinning costs, how much is held."""

from __future__ import annotations

from sim.runtime.recorder import Recorder


class HostMemory:
    """Blocks for offloaded tensors.

    Pinned blocks come from PyTorch's caching host allocator: rounded up to powers of two, kept when they are given back
    and used again; only a new one is pinned (cudaHostAlloc, about 3 ms). That an earlier copy out of a block has ended
    when it is used again is assumed: between the two lies a synchronization or a step. Without the pool every tensor is
    pinned anew; pageable memory comes from malloc, at no cost of its own.
    """

    def __init__(self, recorder: Recorder, pinned: bool = True, pooled: bool = True) -> None:
        self.recorder = recorder
        self.pinned = pinned
        self.pooled = pinned and pooled
        self._free: dict[int, int] = {}  # blocks by size

    def take(self, size_bytes: int) -> int:
        """Take a block for so many bytes; returns its size, to give it back by."""
        if not size_bytes:
            return 0
        block = 1 << (size_bytes - 1).bit_length() if self.pooled else size_bytes
        cached = self._free.get(block, 0)
        if cached:
            self._free[block] = cached - 1
        elif self.pinned:
            self.recorder.host("cuda_host_alloc")
        self.recorder.host_memory(0 if cached else block, block)
        return block

    def give(self, block: int) -> None:
        """Give a block back."""
        if not block:
            return
        if self.pooled:
            self._free[block] = self._free.get(block, 0) + 1
        self.recorder.host_memory(0 if self.pooled else -block, -block)
