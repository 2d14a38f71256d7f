"""ZeRO-Infinity's drives: optimizer states of a sub-group are read before its step on the CPU and written after it, parts
of parameters are read before they are gathered.

What is read and written passes through pinned buffers of main memory. Source: DeepSpeed 0.19.8,
runtime/swap_tensor/pipelined_optimizer_swapper.py and partitioned_param_swapper.py, read there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from sim.program.kernels import ITEM_BYTES, HostCopy
from sim.program.program import NVME_READ, NVME_WRITE
from sim.runtime.host_memory import HostMemory
from sim.runtime.tape import Tape
from sim.scenario.parallel import Zero

SMALLEST_BYTES = 1 << 20
"""Smaller gradients stay in main memory (MIN_SWAPPABLE_BYTES)."""
STATES = 3
"""The fp32 part and two moments."""


class OptimizerDrive:
    """`sizes`: elements of each sub-group's part."""

    def __init__(self, tape: Tape, zero: Zero, sizes: list[int]) -> None:
        self.tape = tape
        self.sizes = [ITEM_BYTES["fp32"] * size for size in sizes]
        self.ahead = zero.pipeline_read
        self.behind = zero.pipeline_write
        self._reading: dict[int, int] = {}
        """Sub-groups whose read is issued, with the event of its end."""
        self._writing: int | None = None
        self._gradients: int | None = None
        """The end of the last gradient's write."""

    def take_buffers(self, memory: HostMemory) -> None:
        """Room for what one step needs (states and gradients), once more for what is read ahead, and for what is still
        being written."""
        self.tape.recorder.nvme_bytes += (STATES + 1) * sum(self.sizes)
        most = max(self.sizes)
        for _ in range((STATES + 1) * (1 + self.ahead + self.behind)):
            memory.take(most)

    def gradient(self, size_bytes: int, stream: int) -> None:
        """A gradient in fp32 goes on to the drive, once its copy from the GPU on `stream` has ended."""
        if size_bytes < SMALLEST_BYTES:
            return
        recorder = self.tape.recorder
        recorder.sync(recorder.record(stream))
        recorder.copy(HostCopy("host_to_nvme", size_bytes), NVME_WRITE)
        self._gradients = recorder.record(NVME_WRITE)

    def read(self, number: int) -> None:
        """The host waits until the sub-group is there; the next one may be on its way then."""
        recorder = self.tape.recorder
        if self._gradients is not None:
            recorder.sync(self._gradients)
            self._gradients = None
        if number not in self._reading:
            self._issue(number)
        recorder.sync(self._reading.pop(number))
        if self.ahead and number + 1 < len(self.sizes):
            self._issue(number + 1)

    def _issue(self, number: int) -> None:
        recorder = self.tape.recorder
        recorder.copy(HostCopy("nvme_to_host", (STATES + 1) * self.sizes[number]), NVME_READ)
        self._reading[number] = recorder.record(NVME_READ)

    def write(self, number: int) -> None:
        """States go back. The host waits for the write, or for the one before."""
        recorder = self.tape.recorder
        self.finish()
        recorder.copy(HostCopy("host_to_nvme", STATES * self.sizes[number]), NVME_WRITE)
        self._writing = recorder.record(NVME_WRITE)
        if not self.behind:
            self.finish()

    def finish(self) -> None:
        """The host waits for the last write."""
        if self._writing is not None:
            self.tape.recorder.sync(self._writing)
            self._writing = None


BUFFERS, BUFFER_ELEMENTS = 5, 100_000_000
"""Of DeepSpeed's pool for parameters (buffer_count, buffer_size)."""
MOST_IN_MEMORY = 1_000_000_000
"""Elements of parts that stay in main memory (max_in_cpu)."""


class OnDrive(Protocol):
    """A parameter as the drives see it."""

    elements: int
    part: int
    on_drive: bool
    reading: int | None


class PartDrive:
    """16-bit parts of parameters on the drives: read into one of a few pinned buffers before they are gathered."""

    def __init__(self, tape: Tape, groups: Sequence[Sequence[OnDrive]], item_bytes: int, memory: HostMemory) -> None:
        """Whole sub-groups stay in main memory while there is room."""
        self.tape = tape
        self.item_bytes = item_bytes
        self.in_memory = 0
        """Elements that stay there."""
        self.away: list[OnDrive] = []
        for group in groups:
            size = sum(p.part for p in group)
            if self.in_memory + size <= MOST_IN_MEMORY:
                self.in_memory += size
                continue
            large = [p for p in group if p.part * item_bytes >= SMALLEST_BYTES]
            self.in_memory += size - sum(p.part for p in large)
            self.away += large
        if not self.away:
            return
        tape.recorder.nvme_bytes += sum(p.part for p in self.away) * item_bytes
        for p in self.away:
            p.on_drive = True
        for _ in range(BUFFERS):
            memory.take(BUFFER_ELEMENTS * item_bytes)

    def fetch(self, parameters: Iterable[OnDrive]) -> None:
        """Read what is not on its way yet; the host waits for all of them."""
        for p in parameters:
            if p.on_drive and p.reading is None:
                self._read(p)
        for p in parameters:
            if p.reading is not None:
                self.tape.recorder.sync(p.reading)

    def read_ahead(self, coming: Iterable[OnDrive], gathering: int) -> None:
        """Of what comes next as many elements as twice those that are being gathered, while buffers are free."""
        free, considered = BUFFERS - sum(p.reading is not None for p in self.away), 0
        for p in coming:
            if considered > 2 * gathering or free <= 0:
                break
            considered += p.elements
            if p.on_drive and p.reading is None:
                self._read(p)
                free -= 1

    def _read(self, p: OnDrive) -> None:
        recorder = self.tape.recorder
        recorder.copy(HostCopy("nvme_to_host", p.part * self.item_bytes), NVME_READ)
        p.reading = recorder.record(NVME_READ)

    def write(self) -> None:
        """After a step; the host waits."""
        recorder = self.tape.recorder
        for p in self.away:
            recorder.copy(HostCopy("host_to_nvme", p.part * self.item_bytes), NVME_WRITE)
        if self.away:
            recorder.sync(recorder.record(NVME_WRITE))
