"""Launches of a CPU: each is an operator with the layouts of its tensors, and the host waits for it."""

from __future__ import annotations

from collections.abc import Iterable

from sim.program.kernels import Layout, Operator, Work
from sim.program.program import COMPUTE
from sim.runtime.recorder import Recorder
from sim.runtime.tensor import Tensor


class CpuRecorder(Recorder):
    """What rules launch as kernels becomes `Operator`s: `node` and `reads` are those of the rule that runs."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(fail_at)
        self.node = ""
        self.reads: tuple[Layout, ...] = ()

    def in_rule(self, node: str, tensors: Iterable[object]) -> None:
        """What is launched from here on belongs to this rule, which is given these tensors (among other things)."""
        self.node = node
        self.reads = tuple(layout(tensor) for tensor in tensors if isinstance(tensor, Tensor))

    def run(self, name: str, out: Tensor | None, reads: tuple[Layout, ...] | None = None, flops: int = 0) -> None:
        """An operator that makes `out`; `reads` None: whatever the rule was given."""
        taken = self.reads if reads is None else reads
        made = layout(out) if out is not None else None
        moved = sum(one.bytes for one in taken) + (made.bytes if made is not None else 0)
        self.launch(name, Operator(name, self.node, taken, made, moved, flops))

    def launch(self, name: str, work: Work, stream: int | None = None) -> None:
        super().launch(name, work, stream)
        self.sync(self.record(COMPUTE))

    def memory_bound(self, name: str, family: str, moved_bytes: int, stream: int | None = None) -> None:
        if moved_bytes:
            self.launch(name, Operator(name, self.node, self.reads, None, moved_bytes), stream)


def layout(tensor: Tensor) -> Layout:
    return Layout(tensor.shape, tensor.dtype, tensor.strides)
