"""Selective checkpointing: outputs of chosen operators are kept in forward and taken back in the recomputation.

create_selective_checkpoint_contexts, with torchtitan's policy (attention and every second matmul) or a user's list of
aten names. TAPE_LLAMA_FSDP.md 2.2: in forward a saved operator's outputs are appended, detached, to a list per
operator; in the recomputation they are popped and nothing is allocated. The lists belong to the region's frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.runtime.tensor import Tensor

ATTENTION = frozenset(
    {
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
    }
)
MATMULS = frozenset({"aten.mm"})
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor"


class Selective:
    """The context pair of one region. `saved` are aten names; every second operator of `alternating` is not saved."""

    def __init__(self, saved: frozenset[str], alternating: frozenset[str]) -> None:
        self.saved = saved
        self.alternating = alternating
        self.recomputing = False
        self.dispatched = 0
        """Operators seen since `take_dispatched`: each costs the host Python time."""
        self._counts = [0, 0]  # alternating operators seen in forward, in the recomputation
        self._kept: dict[str, list[list[Tensor]]] = {}

    def dispatch(self, aten: str, kernel: Callable[[], Any]) -> Any:
        """Run a kernel, or answer it from what was kept."""
        self.dispatched += 1
        if not self.keeps(aten):
            return kernel()
        if self.recomputing:
            outputs = self._kept[aten].pop(0)
            return tuple(outputs) if len(outputs) > 1 else outputs[0]
        result = kernel()
        several = result if isinstance(result, tuple) else (result,)
        self._kept.setdefault(aten, []).append([tensor.detach() for tensor in several])
        return result

    def take_dispatched(self) -> int:
        """Operators seen since the last call."""
        count, self.dispatched = self.dispatched, 0
        return count

    def keeps(self, aten: str) -> bool:
        """Is the output of this run of the operator kept? Counts alternating ones."""
        if aten in self.alternating:
            self._counts[self.recomputing] += 1
            return self._counts[self.recomputing] % 2 == 1
        return aten in self.saved


def policy(save: tuple[str, ...]) -> Callable[[], Selective]:
    """A factory of contexts from a scenario's `save` list; every wrapped call gets a context of its own."""
    saved: set[str] = set()
    alternating: frozenset[str] = frozenset()
    for name in save:
        if name == "attention":
            saved |= ATTENTION
        elif name == "every_second_matmul":
            alternating = MATMULS
            saved.add(REDUCE_SCATTER)  # in torchtitan's list too; it occurs with tensor parallelism only
        elif name == "matmul":
            saved |= MATMULS | {"aten.addmm"}
        else:
            saved.add(name)
    chosen = frozenset(saved)
    return lambda: Selective(chosen, alternating)
