"""Gradient clipping and AdamW as torch runs them: what they allocate and launch (TAPE.md 7, TAPE_LLAMA_FSDP.md 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.program.kernels import CPU_MEMORY, ITEM_BYTES, Collective
from sim.program.program import ALL_REDUCE, COMPUTE, Owner
from sim.runtime import scratch
from sim.runtime.host_memory import HostMemory
from sim.runtime.recorder import Recorder
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

if TYPE_CHECKING:
    from sim.runtime.sharding.parameters import ShardedParameter

NORM_CHUNK = 65_536  # elements per block of _foreach_norm
MIB = 1 << 20
STEP_TENSORS = 7  # of a parameter's size, that one fused step reads and writes
FOREACH_KERNELS = {
    "aten::_foreach_mul_ (weight decay)": 2,
    "aten::_foreach_lerp_": 3,
    "aten::_foreach_mul_": 2,
    "aten::_foreach_addcmul_": 4,
    "aten::_foreach_sqrt": 2,
    "aten::_foreach_div_": 2,
    "aten::_foreach_add_": 2,
    "aten::_foreach_addcdiv_": 4,
}
"""Kernels of a step that is not fused, by tensors read and written (torch/optim/adamw.py)."""


def clip_grad_norm(
    tape: Tape, parameters: list[Tensor], shard_ranks: int, summed: Callable[[], None] | None = None
) -> None:
    """torch.nn.utils.clip_grad_norm_(foreach=True). Over several ranks gradients are DTensors, the norm is reduced.

    `summed` is called once the norm is there: the place to add up those of other stages.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    n, dtype, recorder = len(gradients), gradients[0].dtype, tape.recorder
    total_bytes = sum(g.bytes for g in gradients)
    total = _total_norm(tape, gradients, n, dtype, shard_ranks)
    if summed is not None:
        summed()
    plus_eps, reciprocal = tape.empty((), dtype), tape.empty((), dtype)
    coefficient = tape.empty((), dtype)
    del plus_eps, reciprocal
    clamped = tape.empty((), dtype)
    recorder.memory_bound("aten::clamp", "elementwise", 4 * 4 * ITEM_BYTES[dtype])
    recorder.memory_bound("aten::_foreach_mul_", "elementwise", 2 * total_bytes)
    del total, coefficient, clamped


def _total_norm(tape: Tape, gradients: list[Tensor], n: int, dtype: str, shard_ranks: int) -> Tensor:
    recorder = tape.recorder
    chunks = max(scratch.ceil_div(g.elements, NORM_CHUNK) for g in gradients)
    partial = tape.empty((n, chunks), "fp32")
    norms = [tape.empty((), dtype) for _ in gradients]
    recorder.memory_bound("aten::_foreach_norm", "reduce", sum(g.bytes for g in gradients))
    del partial
    stacked = tape.pointwise("aten::stack", (n,), dtype, None, n * ITEM_BYTES[dtype])
    if shard_ranks > 1:
        powers = tape.pointwise("aten::pow", (n,), dtype, None, stacked.bytes)
        reduced = tape.empty((n,), dtype)
        recorder.stream_waits_stream(ALL_REDUCE, COMPUTE)
        recorder.collective(Collective("all_reduce", reduced.bytes, "fsdp", shard_ranks, dtype), ALL_REDUCE)
        recorder.stream_waits_stream(COMPUTE, ALL_REDUCE)
        roots = tape.pointwise("aten::pow", (n,), dtype, None, reduced.bytes)
        del powers, reduced
        total = tape.pointwise("aten::linalg_vector_norm", (), dtype, None, roots.bytes, "reduce")
        del roots
    else:
        total = tape.pointwise("aten::linalg_vector_norm", (), dtype, None, stacked.bytes, "reduce")
    del stacked, norms
    return total


class StepOptimizer:
    """What optimizers share: parameters (local shards), state per parameter, zero_grad."""

    def __init__(self, tape: Tape, parameters: list[Tensor], variant: str) -> None:
        self.tape = tape
        self.parameters = parameters
        self.variant = variant
        self.state: dict[int, list[Tensor]] = {}

    @property
    def clipped(self) -> list[Tensor]:
        """The parameters whose gradients are clipped."""
        return self.parameters

    def before_backward(self) -> None:
        """A micro-batch's backward begins: nothing, in most optimizers."""

    def after_backward(self) -> None:
        """It has ended: nothing, in most optimizers."""

    def prepare(self) -> None:
        """What happens between backward and clipping: nothing, in most optimizers."""

    def step(self) -> None:
        raise NotImplementedError

    def stepped(self) -> list[Tensor]:
        """The parameters that have a gradient; walking them costs the host time."""
        parameters = [p for p in self.parameters if p.grad is not None]
        self.tape.recorder.host("optimizer_loop", len(parameters))
        return parameters

    def zero_grad(self) -> None:
        """set_to_none: every gradient is dropped, in order."""
        for p in self.parameters:
            p.grad = None


class AdamW(StepOptimizer):
    """torch.optim.AdamW. State appears at the first step: [step 4 B if fused], exp_avg, exp_avg_sq."""

    def step(self) -> None:
        tape = self.tape
        stepped = self.stepped()
        for p in stepped:
            if id(p) not in self.state:
                self._create_state(p)
        moved = sum(_step_bytes(p) for p in stepped)
        if self.variant == "fused":
            tape.reads(stepped)
            tape.recorder.memory_bound("aten::_fused_adamw_", "optimizer", moved)
        elif self.variant == "foreach":
            roots = [tape.empty(p.shape, p.dtype, owner=Owner.OPTIMIZER) for p in stepped]  # _foreach_sqrt
            _foreach_kernels(tape, sum(p.bytes for p in stepped))
            del roots
        else:
            self._for_loop(stepped)

    def _create_state(self, p: Tensor) -> None:
        tape = self.tape
        state = self.state[id(p)] = []
        if self.variant == "fused":
            state.append(tape.empty((), "fp32", owner=Owner.OPTIMIZER))
        for _ in range(2):
            moment = tape.empty(p.shape, p.dtype, owner=Owner.OPTIMIZER)
            tape.recorder.memory_bound("aten::zeros_like", "fill", moment.bytes)
            state.append(moment)
            del moment

    def _for_loop(self, stepped: list[Tensor]) -> None:
        """(sqrt / c).add_: the previous parameter's denominator dies on rebinding, so up to three buffers live."""
        tape, denominator, root = self.tape, None, None
        for p in stepped:
            root = tape.empty(p.shape, p.dtype, owner=Owner.OPTIMIZER)
            denominator, root = tape.empty(p.shape, p.dtype, owner=Owner.OPTIMIZER), None
            _foreach_kernels(tape, p.bytes)
        del denominator, root


class CpuAdamW:
    """AdamW on shards that live on the host (FSDP2's CPUOffloadPolicy): the training thread does the work itself.

    `shards`: of every trained parameter; `host`: where their gradients lie. Moments are pageable, fp32 like the shards.
    """

    def __init__(self, tape: Tape, shards: list[ShardedParameter], dtype: str, variant: str, host: HostMemory) -> None:
        self.tape = tape
        self.shards = shards
        self.variant = variant
        self.host = host
        self.bytes = sum(p.shard_elements for p in shards) * ITEM_BYTES[dtype]
        self.has_state = False

    def prepare(self) -> None:
        """Nothing happens between backward and clipping."""

    def clip(self) -> None:
        """Read the gradients for their norm; read and write them to scale. (The norm's all-reduce is left out.)"""
        cpu_work(self.tape.recorder, 3 * self.bytes)

    def step(self) -> None:
        recorder = self.tape.recorder
        recorder.host("optimizer_loop", len(self.shards))
        if not self.has_state:
            recorder.host_memory(2 * self.bytes, 2 * self.bytes)
            self.has_state = True
        tensors = STEP_TENSORS if self.variant == "fused" else sum(FOREACH_KERNELS.values())
        cpu_work(recorder, tensors * self.bytes)

    def zero_grad(self) -> None:
        for p in self.shards:
            if p.host_gradient is not None:
                self.host.give(p.host_gradient)
                p.host_gradient = None


def cpu_work(recorder: Recorder, moved_bytes: int) -> None:
    """The training thread reads and writes so many bytes of host memory."""
    recorder.host(CPU_MEMORY, -(-moved_bytes // MIB))


def _step_bytes(p: Tensor) -> int:
    """Read parameter, gradient and both moments; write parameter and moments."""
    return STEP_TENSORS * p.bytes


def _foreach_kernels(tape: Tape, size_bytes: int) -> None:
    """The multi-tensor kernels of one AdamW step."""
    for name, tensors in FOREACH_KERNELS.items():
        tape.recorder.memory_bound(name, "optimizer", tensors * size_bytes)
