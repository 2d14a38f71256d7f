"""The step of ZeRO stages 1 and 2: overflow, norm, an fp32 gradient of the own part, the optimizer, one all-gather.

Source: DeepSpeed 0.19.8, stage_1_and_2.py (step, get_grad_norm_direct); recorded but for scalars.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.program.kernels import ITEM_BYTES, Collective
from sim.program.program import COMPUTE, Owner
from sim.runtime.optimizer import StepOptimizer
from sim.runtime.optimizers import make_optimizer
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Optimizer

NORM_BYTES = 8  # norms are taken in fp64


class PartitionStep(StepOptimizer):
    """`mains`: the own part in fp32, whole or in sub-groups that are stepped one by one; `flat`: the parameters of the
    model, of which it is a part (stage 3: the part). `sizes`: gradients that belong to each sub-group; None: all.

    `before` a step and `after` it, instead of gathering all parameters, something may be called.
    """

    def __init__(
        self, tape: Tape, mains: list[Tensor], flat: Tensor, ranks: int, setup: Optimizer,
        sizes: list[int] | None = None, before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(tape, mains, setup.variant)
        self.mains = mains
        self.flat = flat
        self.ranks = ranks
        self.sizes = sizes
        self.before = before
        self.after = after
        self.clips = setup.clip_norm is not None
        self.inner = [make_optimizer(tape, [main], setup) for main in mains]
        self._kept: list[Tensor] = []

    @property
    def keeps(self) -> bool:
        """There are gradients of an earlier micro-batch."""
        return bool(self._kept)

    def keep(self, gradients: list[Tensor]) -> None:
        """Averaged gradients of the own part after a backward; those of further micro-batches are added."""
        if not self._kept:
            self._kept = gradients
            return
        for gradient in gradients:
            self.tape.recorder.memory_bound("aten::add_", "elementwise", 3 * gradient.bytes)

    def prepare(self) -> None:
        """Does any gradient overflow? Then the norm, in double precision, gradient by gradient."""
        recorder = self.tape.recorder
        if self.before is not None:
            self.before()
        for gradient in self._kept:
            recorder.memory_bound("aten::amax", "reduce", gradient.bytes)
            recorder.memory_bound("aten::amin", "reduce", gradient.bytes)
        self._agree(1, "bool")
        recorder.sync(recorder.record(COMPUTE))
        for gradient in self._kept:
            size_bytes = gradient.elements * NORM_BYTES
            self.tape.scratch(size_bytes)
            recorder.memory_bound("aten::copy_", "elementwise", gradient.bytes + size_bytes)
            recorder.memory_bound("aten::linalg_vector_norm", "reduce", size_bytes)
        self._agree(4, "fp32")
        recorder.sync(recorder.record(COMPUTE))

    def step(self) -> None:
        whole = list(self._kept)
        for number, main in enumerate(self.mains):
            count = len(whole) if self.sizes is None else self.sizes[number]
            own, whole = whole[:count], whole[count:]
            if number == len(self.mains) - 1:
                self._kept.clear()
            self._step_group(number, main, own)
        if self.after is not None:
            self.after()
        elif self.ranks > 1:
            work = Collective("all_gather", self.flat.bytes, "dp", self.ranks, self.flat.dtype)
            self.tape.recorder.collective(work, COMPUTE)

    def _step_group(self, number: int, main: Tensor, gradients: list[Tensor]) -> None:
        """Join the gradients, cast them, step, and write the parameters."""
        tape, recorder = self.tape, self.tape.recorder
        joined = tape.empty(main.shape, self.flat.dtype, owner=Owner.GRADIENT) if len(gradients) > 1 else None
        if joined is not None:
            recorder.memory_bound("aten::cat", "copy", 2 * joined.bytes)
        main.grad = tape.empty(main.shape, "fp32", owner=Owner.GRADIENT)
        moved = main.bytes + main.elements * ITEM_BYTES[self.flat.dtype]
        recorder.memory_bound("aten::copy_", "elementwise", moved)
        del joined
        gradients.clear()
        if self.clips:
            recorder.memory_bound("aten::mul_", "elementwise", 2 * main.bytes)
        self.inner[number].step()
        main.grad = None
        recorder.memory_bound("aten::copy_", "elementwise", moved)

    def _agree(self, size_bytes: int, dtype: str) -> None:
        if self.ranks > 1:
            self.tape.recorder.collective(Collective("all_reduce", size_bytes, "dp", self.ranks, dtype), COMPUTE)

    def zero_grad(self) -> None:
        """Gradients are gone already."""
