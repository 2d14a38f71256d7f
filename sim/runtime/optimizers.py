"""SGD, 8-bit AdamW, and steps taken inside backward: what they allocate and launch."""

from __future__ import annotations

from dataclasses import replace

from sim.program.program import Owner, Phase
from sim.runtime.optimizer import AdamW, StepOptimizer
from sim.runtime.scratch import ceil_div
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Optimizer

SMALLEST_8_BIT = 4096
BLOCK_8_BIT = 256
QUANTIZATION_MAP = 256
"""bitsandbytes 0.50: parameters with fewer elements keep fp32 moments; elements per fp32 scale; entries of the map."""


class Sgd(StepOptimizer):
    """torch.optim.SGD without weight decay. The momentum buffer, if any, is the first gradient, copied."""

    def __init__(self, tape: Tape, parameters: list[Tensor], variant: str, momentum: float) -> None:
        super().__init__(tape, parameters, variant)
        self.momentum = momentum

    def step(self) -> None:
        recorder, stepped = self.tape.recorder, self.stepped()
        if self.variant == "for-loop":
            for p in stepped:
                self._update([p], "aten::", self._create_states([p]))
            return
        first = self._create_states(stepped)
        if self.variant == "foreach":
            self._update(stepped, "aten::_foreach_", first)
            return
        tensors = 5 if self.momentum else 3
        recorder.memory_bound("aten::_fused_sgd_", "optimizer", tensors * sum(p.bytes for p in stepped))

    def _create_states(self, stepped: list[Tensor]) -> bool:
        """Momentum buffers where there are none yet. Returns whether it made any."""
        missing = [p for p in stepped if self.momentum and id(p) not in self.state]
        for p in missing:
            self.state[id(p)] = [self.tape.empty(p.shape, p.dtype, owner=Owner.OPTIMIZER)]
            if self.variant != "fused":
                self.tape.recorder.memory_bound("aten::clone", "copy", 2 * p.bytes)
        return bool(missing)

    def _update(self, stepped: list[Tensor], prefix: str, first: bool) -> None:
        size_bytes, recorder = sum(p.bytes for p in stepped), self.tape.recorder
        if self.momentum and not first:
            recorder.memory_bound(f"{prefix}mul_", "optimizer", 2 * size_bytes)
            recorder.memory_bound(f"{prefix}add_ (momentum)", "optimizer", 3 * size_bytes)
        recorder.memory_bound(f"{prefix}add_", "optimizer", 3 * size_bytes)


class AdamW8bit(StepOptimizer):
    """bitsandbytes.optim.AdamW8bit 0.50: one kernel per parameter, moments in 8 bit with a scale per 256 elements.

    The two quantization maps come with the first 8-bit parameter and are shared.
    """

    def __init__(self, tape: Tape, parameters: list[Tensor]) -> None:
        super().__init__(tape, parameters, "8-bit")
        self._maps: list[Tensor] = []

    def step(self) -> None:
        for p in self.stepped():
            if id(p) not in self.state:
                self._create_state(p)
            moved = 3 * p.bytes + 2 * sum(moment.bytes for moment in self.state[id(p)])
            self.tape.recorder.memory_bound("bitsandbytes::optimizer_update_8bit_blockwise", "optimizer", moved)

    def _create_state(self, p: Tensor) -> None:
        if p.elements < SMALLEST_8_BIT:
            self.state[id(p)] = [self._zeros(p.shape, "fp32") for _ in range(2)]
            return
        if not self._maps:
            self._maps = [self._zeros((QUANTIZATION_MAP,), "fp32") for _ in range(2)]
        scales = (ceil_div(p.elements, BLOCK_8_BIT),)
        moments = [self._zeros(p.shape, "uint8") for _ in range(2)]
        self.state[id(p)] = [*moments, *(self._zeros(scales, "fp32") for _ in range(2))]

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return self.tape.pointwise_for(Owner.OPTIMIZER, "aten::zeros", shape, dtype)


class MasterWeights(StepOptimizer):
    """fp32 copies of 16-bit parameters, which another optimizer steps (Megatron's Float16OptimizerWithFloat16Params).

    Between backward and clipping each gradient is cast to fp32 and dropped; the masters' gradients live until zero_grad.
    """

    def __init__(self, tape: Tape, parameters: list[Tensor], setup: Optimizer) -> None:
        super().__init__(tape, [p for p in parameters if p.requires_grad], setup.variant)
        self.masters = [self._master(p) for p in self.parameters]
        self.inner = make_optimizer(tape, self.masters, replace(setup, master_weights=False))

    def _master(self, p: Tensor) -> Tensor:
        """p.detach().clone().float()."""
        copy = self.tape.pointwise("aten::clone", p.shape, p.dtype, None, p.bytes, "copy")
        master = self.tape.empty(p.shape, "fp32", owner=Owner.OPTIMIZER)
        self.tape.recorder.memory_bound("aten::copy_", "copy", copy.bytes + master.bytes)
        master.requires_grad = True
        return master

    @property
    def clipped(self) -> list[Tensor]:
        return self.masters

    def prepare(self) -> None:
        for p, master in zip(self.parameters, self.masters):
            if p.grad is not None:
                master.grad = self.tape.cast_copy(p.grad, "fp32")
                master.grad.storage.belongs_to(Owner.GRADIENT)
                p.grad = None

    def step(self) -> None:
        self.inner.step()
        moved = sum(p.bytes + master.bytes for p, master in zip(self.parameters, self.masters))
        self.tape.recorder.memory_bound("aten::_foreach_copy_", "copy", moved)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.inner.zero_grad()


class Bf16Optimizer(MasterWeights):
    """The same with fp32 gradients that stay, to which every backward's are added; 16-bit ones stay too, and are zeroed as the
    next backward begins (deepspeed/runtime/bf16_optimizer.py on one rank; its parameters lie in one flat buffer, here not)."""

    def __init__(self, tape: Tape, parameters: list[Tensor], setup: Optimizer) -> None:
        super().__init__(tape, parameters, replace(setup, fp32_gradients=False))
        for master in self.masters:
            master.grad = tape.pointwise_for(Owner.GRADIENT, "aten::zeros_like", master.shape, "fp32")

    def before_backward(self) -> None:
        moved = sum(p.grad.bytes for p in self.parameters if p.grad is not None)
        if moved:
            self.tape.recorder.memory_bound("aten::_foreach_zero_", "fill", moved)

    def after_backward(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                wide = self.tape.cast_copy(p.grad, "fp32")
                self.tape.recorder.memory_bound("aten::add_", "elementwise", 3 * wide.bytes)
                del wide

    def prepare(self) -> None:
        """The gradients are there."""

    def step(self) -> None:
        super().step()
        self.tape.recorder.memory_bound("aten::zero_", "fill", sum(master.bytes for master in self.masters))

    def zero_grad(self) -> None:
        """Nothing is freed."""


class InBackward:
    """A step per parameter as soon as its gradient is there, after which the gradient dies.

    register_post_accumulate_grad_hook with one optimizer per parameter (PyTorch's tutorial; LOMO, GaLore, torchtune).
    """

    def __init__(self, tape: Tape, parameters: list[Tensor], setup: Optimizer) -> None:
        self.tape = tape
        self.optimizers = {id(p): make_optimizer(tape, [p], setup) for p in parameters}
        for p in parameters:
            p.after_accumulate = self._step

    def _step(self, p: Tensor) -> None:
        recorder = self.tape.recorder
        before = recorder.base, recorder.where, recorder.default_owner
        with self.tape.phase(Phase.OPTIMIZER, Owner.OPTIMIZER):
            optimizer = self.optimizers[id(p)]
            optimizer.prepare()
            optimizer.step()
            optimizer.zero_grad()
        recorder.base, recorder.where, recorder.default_owner = before


def make_optimizer(tape: Tape, parameters: list[Tensor], setup: Optimizer) -> StepOptimizer:
    """The optimizer that a set-up names, over these parameters."""
    if setup.fp32_gradients:
        return Bf16Optimizer(tape, parameters, setup)
    if setup.master_weights:
        return MasterWeights(tape, parameters, setup)
    if setup.name == "sgd":
        return Sgd(tape, parameters, setup.variant, setup.momentum)
    if setup.name == "adamw-8bit":
        return AdamW8bit(tape, parameters)
    return AdamW(tape, parameters, setup.variant)
