"""A tape with a CPU's rules (torch 2.13, products by BLAS). No workspaces and no kernel-internal buffers show there; a
checkpointed region keeps the generator's state on the device, which here is the host.

Host time apart from kernels is a row of its own: one per operator or view, and one per node of the backward. What it
takes is measured (`calibration.check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from sim.model.calls import Shape
from sim.program.kernels import Layout
from sim.program.program import Owner
from sim.runtime.autograd import Gradients, Node
from sim.runtime.cpu.recorder import CpuRecorder
from sim.runtime.ops.base import Op
from sim.runtime.strides import Strides
from sim.runtime.tape import DeviceFacts, Tape
from sim.runtime.tensor import Tensor

GENERATOR_STATE_BYTES = 5056  # torch.get_rng_state() of the CPU's generator
OPERATOR = "operator"
"""Host work: what the framework spends on one operator, view or node of a backward apart from its kernel."""


class CpuTape(Tape):
    """Records what a CPU runs, on a `CpuRecorder`."""

    rules: ClassVar[dict[str, Callable[..., Any]]] = {}  # type: ignore[misc] # filled by sim.runtime.cpu.rules
    recorder: CpuRecorder

    def __init__(self, recorder: CpuRecorder) -> None:
        super().__init__(recorder, DeviceFacts(sms=1))

    # -- operators ---------------------------------------------------------------------------------------------
    def _kernel(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        self.recorder.host(OPERATOR)
        if self.selective is not None and op.aten:
            return self.selective.dispatch(op.aten, lambda: self.run_forward(op, inputs, attributes))
        if self.selective is not None:
            self.selective.dispatched += 1  # a dispatch mode sees views, its policy is not asked
        return self.run_forward(op, inputs, attributes)

    def run_forward(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        """An operator itself, where it is not answered from what was kept."""
        self.reads(inputs)
        return op.forward(self, *inputs, *attributes)

    def run_formula(self, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        self.recorder.host(OPERATOR)
        self.reads((*gradients, *saved), node.op.node)
        return super().run_formula(node, gradients, saved)

    # -- buffers and kernels -----------------------------------------------------------------------------------
    def reads(self, tensors: Iterable[Tensor | None], node: str = "") -> None:
        self.recorder.in_rule(node, tensors)

    def scratch(self, *sizes_bytes: int) -> None:
        """Nothing: what a GPU's kernels need inside."""

    def generator_state(self) -> Tensor:
        return self.empty((GENERATOR_STATE_BYTES,), "uint8")

    def pointwise(
        self, name: str, shape: Shape, dtype: str, strides: Strides, read_bytes: int, family: str = "elementwise"
    ) -> Tensor:
        out = self.empty(shape, dtype, strides)
        self.recorder.run(name, out)
        return out

    def pointwise_for(self, owner: Owner, name: str, shape: Shape, dtype: str) -> Tensor:
        out = self.empty(shape, dtype, owner=owner)
        self.recorder.run(name, out, ())
        return out

    def matmul_out(
        self,
        name: str,
        m: int,
        n: int,
        k: int,
        dtype: str,
        batch: int = 0,
        out: Tensor | None = None,
        over_rows: bool = False,
    ) -> Tensor:
        """A product of [m, k] and [k, n]. Weights and, on the way back, activations come transposed."""
        if out is None:
            out = self.empty((batch, m, n) if batch else (m, n), dtype)
        self.recorder.run(name, out, self._factors(m, n, k, dtype, batch), flops=2 * max(batch, 1) * m * n * k)
        return out

    def _factors(self, m: int, n: int, k: int, dtype: str, batch: int) -> tuple[Layout, ...]:
        """Forward x [m, k] and a weight's transpose; backward the gradient and the weight as it is stored, or for the
        weight's gradient [m, n] the transposed gradient and x, whose product is its transpose [n, m]."""
        lead = (batch,) if batch else ()
        given = self.recorder.reads
        if not self.recorder.node:
            return given[-2], given[-1]
        rows, width = given[0].shape[-2:]
        if (rows, width) == (m, k):
            return Layout((*lead, m, k), dtype), Layout((*lead, k, n), dtype)
        step = (k * n,) if batch else ()
        return Layout((*lead, n, k), dtype, (*step, 1, n)), Layout((*lead, k, m), dtype)

    def sum_to(self, gradient: Tensor, shape: Shape) -> Tensor:
        out = self.empty(shape, gradient.dtype)
        self.reads((gradient,), "sum_to")
        self.recorder.run("aten::sum", out)
        return out

    def launch_accumulation(self, total: Tensor, gradient: Tensor, in_place: bool) -> None:
        self.reads((total, gradient))
        self.recorder.run("aten::add_" if in_place else "aten::add", None if in_place else total)
