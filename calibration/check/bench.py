"""The device that real steps run on: how a whole step is timed, what its memory peaks are, how it is traced.

Nothing of `CudaBench` has run on a GPU yet; the script around it runs on processors in the tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from calibration.check.clock import prepare
from calibration.check.peaks import peak_bytes

Step = Callable[[], None]
TRACE, SNAPSHOT = "trace.json", "snapshot.pickle"
HISTORY_ENTRIES = 1_000_000


class Bench(Protocol):
    """`backend`: of torch.distributed between several of them."""

    backend: str
    device: torch.device

    def time_ns(self, step: Step) -> float:
        """Of a step from an idle device until it is idle again."""
        ...

    def peaks(self, step: Step) -> tuple[int, int]:
        """Bytes allocated and reserved at the peak of a step; a device without a caching allocator reserves none."""
        ...

    def trace(self, step: Step, folder: Path) -> None:
        """Leave a step's Kineto trace, and a memory snapshot where there is one, in a folder."""
        ...


class CpuBench:
    backend = "gloo"

    def __init__(self, _: int = 0) -> None:
        prepare()
        self.device = torch.device("cpu")

    def time_ns(self, step: Step) -> float:
        begin = time.perf_counter_ns()
        step()
        return float(time.perf_counter_ns() - begin)

    def peaks(self, step: Step) -> tuple[int, int]:
        return peak_bytes(step), 0

    def trace(self, step: Step, folder: Path) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        profiler.export_chrome_trace(str(folder / TRACE))


class CudaBench:
    backend = "nccl"

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)

    def time_ns(self, step: Step) -> float:
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter_ns()
        step()
        torch.cuda.synchronize(self.device)
        return float(time.perf_counter_ns() - begin)

    def peaks(self, step: Step) -> tuple[int, int]:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def trace(self, step: Step, folder: Path) -> None:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize(self.device)
        torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
        torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(str(folder / TRACE))


BENCHES: dict[str, Callable[[int], Bench]] = {"cpu": CpuBench, "cuda": CudaBench}
