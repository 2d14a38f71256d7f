"""PyTorch on a CPU where it differs from a GPU: other kernels, nothing asynchronous, every operator timed as it is."""

from sim.runtime import ops
from sim.runtime.cpu import rules
from sim.runtime.cpu.recorder import CpuRecorder
from sim.runtime.cpu.tape import CpuTape

assert ops and rules  # importing them fills the tapes' rules

__all__ = ["CpuRecorder", "CpuTape"]
