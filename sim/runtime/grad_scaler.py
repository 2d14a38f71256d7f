"""torch.amp.GradScaler: a factor on the loss, gradients divided by it and checked, a step that may be skipped.

Fused optimizers skip by themselves, on the device; for the others the host reads whether any gradient overflowed.
Source: torch 2.13, torch/amp/grad_scaler.py; its operators are compared in tests/exact/test_grad_scaler.py.
"""

from __future__ import annotations

from sim.program.program import COMPUTE, Owner
from sim.runtime.optimizer import StepOptimizer
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class GradScaler:
    """Its factor and the count of good steps appear with the first loss."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._scale: Tensor | None = None
        self._growth: Tensor | None = None
        self._found: Tensor | None = None

    def scaled(self, loss: Tensor) -> Tensor:
        """scaler.scale(loss)."""
        if self._scale is None:
            self._scale = self._full("fp32")
            self._growth = self._full("int32")
        result: Tensor = self.tape.rules["mul"](self.tape, loss, self._scale)
        return result

    def unscale(self, optimizer: StepOptimizer) -> None:
        """scaler.unscale_(optimizer), before gradients are clipped."""
        tape = self.tape
        double = tape.pointwise("aten::_to_copy", (), "int64", None, 4)  # as wide as an fp64
        reciprocal = tape.pointwise("aten::reciprocal", (), "int64", None, double.bytes)
        inverse = tape.pointwise("aten::_to_copy", (), "fp32", None, reciprocal.bytes)
        self._check(optimizer)
        del double, reciprocal, inverse

    def before_step(self, optimizer: StepOptimizer) -> None:
        """scaler.step(optimizer), up to the optimizer's own step."""
        if optimizer.variant == "fused":
            if self._found is None:
                dummy = self._full("fp32")
                self._check(optimizer)
                del dummy
            return
        if self._found is None:
            self.unscale(optimizer)
        self.tape.recorder.sync(self.tape.recorder.record(COMPUTE))

    def update(self) -> None:
        """scaler.update(): the factor shrinks or, after many good steps, grows."""
        self.tape.recorder.memory_bound("aten::_amp_update_scale_", "elementwise", 16)
        self._found = None

    def _check(self, optimizer: StepOptimizer) -> None:
        self._found = self._full("fp32")
        moved = 2 * sum(p.grad.bytes for p in optimizer.parameters if p.grad is not None)
        self.tape.recorder.memory_bound("aten::_amp_foreach_non_finite_check_and_unscale_", "elementwise", moved)

    def _full(self, dtype: str) -> Tensor:
        return self.tape.pointwise_for(Owner.OPTIMIZER, "aten::fill_", (), dtype)
