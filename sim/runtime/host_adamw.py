"""AdamW whose moments and step are on the host while the parameters stay on the GPU (torchao's CPUOffloadOptimizer).

Every parameter from 4,096 elements on has a pinned copy with a pinned gradient. As soon as its gradient is there it
leaves on a stream of its own, beside the rest of backward. The step walks the parameters in the order in which their
gradients left: it waits for one, runs AdamW on the CPU, and sends the parameter back behind all that left before; at its
end it waits for the last. So the CPU works beside backward if nothing else waits for the GPU in between.
"""

from __future__ import annotations

from dataclasses import replace

from sim.program.kernels import HostCopy
from sim.program.program import COMPUTE, DEVICE_TO_HOST
from sim.runtime.host_memory import HostMemory
from sim.runtime.optimizer import STEP_TENSORS, StepOptimizer, cpu_work
from sim.runtime.optimizers import make_optimizer
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Optimizer

SMALLEST = 4096
"""Smaller parameters are stepped on the GPU."""


class HostAdamW(StepOptimizer):
    """`setup.offload`: "gradients" also frees a gradient once it has left, by record_stream."""

    def __init__(self, tape: Tape, parameters: list[Tensor], setup: Optimizer) -> None:
        super().__init__(tape, parameters, setup.variant)
        self.frees_gradients = setup.offload == "gradients"
        trained = [p for p in parameters if p.requires_grad]
        self.away = [p for p in trained if p.elements >= SMALLEST]
        small = [p for p in trained if p.elements < SMALLEST]
        self.on_device = make_optimizer(tape, small, replace(setup, offload=None)) if small else None
        self.memory = HostMemory(tape.recorder)
        self.queue: dict[int, tuple[Tensor, int]] = {}
        """Parameters whose gradients have left, with the event of the copy, in that order."""
        for p in self.away:
            for _ in ("parameter", "gradient"):
                self.memory.take(p.bytes)
            tape.recorder.copy(HostCopy("device_to_host", p.bytes), COMPUTE)
            p.after_accumulate = self._leave

    def _leave(self, p: Tensor) -> None:
        """The gradient leaves; if it has left in this step already (accumulation), it goes to the end of the queue."""
        assert p.grad is not None
        recorder = self.tape.recorder
        recorder.stream_waits_stream(DEVICE_TO_HOST, COMPUTE)
        recorder.copy(HostCopy("device_to_host", p.grad.bytes), DEVICE_TO_HOST)
        self.queue.pop(id(p), None)
        self.queue[id(p)] = p, recorder.record(DEVICE_TO_HOST)
        if self.frees_gradients:
            p.grad.storage.used_by(DEVICE_TO_HOST)
            p.grad = None

    def step(self) -> None:
        recorder = self.tape.recorder
        if self.on_device is not None:
            self.on_device.step()
        for p, left in self.queue.values():
            recorder.sync(left)
            recorder.host("optimizer_loop")
            if id(p) not in self.state:
                recorder.host_memory(2 * p.bytes, 2 * p.bytes)  # pageable moments
                self.state[id(p)] = []
            cpu_work(recorder, STEP_TENSORS * p.bytes)
            recorder.copy(HostCopy("host_to_device", p.bytes), DEVICE_TO_HOST)
        recorder.sync(recorder.record(DEVICE_TO_HOST))
        self.queue.clear()
