"""Autograd without values: nodes, saved tensors, and the engine that walks the tape back.

The order inside one node is PyTorch's own (TAPE.md section 2): unpack all saved tensors, run the formula, drop what was
unpacked, bring each result to its input's shape and dtype, drop the incoming gradients, release the saved tensors, hand
the results to their consumers one by one.
"""

from __future__ import annotations

import heapq
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from sim.model.calls import Shape
from sim.program.program import Owner
from sim.runtime.recorder import Operators
from sim.runtime.strides import dense
from sim.runtime.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.runtime.ops.base import Op
    from sim.runtime.tape import Tape

Edge = tuple[Any, int]
Gradients = list[Tensor | None]


class SavedTensorHook(Protocol):
    """torch.autograd.graph.saved_tensors_hooks: what to keep instead of a tensor, and how to get it back."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, packed: Any) -> Tensor: ...


class SavedTensor:
    """A tensor that backward needs: itself, or what the innermost hook made of it."""

    __slots__ = ("hook", "value")

    def __init__(self, tape: Tape, tensor: Tensor | None) -> None:
        self.hook: SavedTensorHook | None = tape.hooks[-1] if tape.hooks and tensor is not None else None
        self.value: Any = self.hook.pack(tensor) if self.hook is not None and tensor is not None else tensor

    def unpack(self) -> Any:
        return self.hook.unpack(self.value) if self.hook is not None else self.value

    def release(self) -> None:
        self.value = self.hook = None


class Node:
    """One operator's place on the tape. `edges[i]` leads to the producer of input i, None where no gradient is needed."""

    __slots__ = ("__weakref__", "attributes", "base", "edges", "metas", "op", "pre_hooks", "saved", "sequence")

    def __init__(self, tape: Tape, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]):
        self.op = op
        self.attributes = attributes
        self.base = tape.recorder.base
        self.sequence = tape.sequence
        tape.sequence += 1
        self.saved: list[SavedTensor] = []
        self.pre_hooks: list[Callable[[Gradients], None]] | None = None
        self.edges: list[Edge | None] = [gradient_edge(tensor) for tensor in inputs]
        self.metas: list[tuple[Shape, str]] = [(t.shape, t.dtype) if t is not None else ((), "") for t in inputs]

    def needs(self, index: int) -> bool:
        return self.edges[index] is not None

    def backward(self, tape: Tape, gradients: Gradients) -> Gradients:
        # what is unpacked lives until here ends; the saved tensors themselves live longer
        return tape.run_formula(self, gradients, [saved.unpack() for saved in self.saved])

    def release(self) -> None:
        for saved in self.saved:
            saved.release()
        self.saved = []


class AccumulateGrad:
    """The end of the tape at a leaf: the first gradient is taken over, later ones are added in place.

    A gradient has the leaf's strides if the leaf is dense, else plain ones; one that has not is copied (TAPE.md 2.5).
    """

    __slots__ = ("__weakref__", "base", "leaf")
    sequence = 1 << 62  # runs as soon as it is ready
    edges: tuple[Edge, ...] = ()
    metas: tuple[tuple[Shape, str], ...] = ()
    pre_hooks: list[Callable[[Gradients], None]] | None = None

    def __init__(self, leaf: Tensor, base: int) -> None:
        self.leaf = leaf
        self.base = base

    class op:  # noqa: N801 (stands where a node has its operator)
        number = Operators.number("AccumulateGrad")

    def backward(self, tape: Tape, gradients: Gradients) -> Gradients:
        gradient = gradients[0] if gradients else None  # none: its producer has added it to the main gradient,
        if gradient is None and tape.weight_store is not None:  # or put it off
            return []
        if gradient is not None and self.leaf.grad is None:
            if gradient.strides != (layout := dense(self.leaf.shape, self.leaf.strides)):
                gradient = tape.pointwise("aten::clone", gradient.shape, gradient.dtype, layout, gradient.bytes, "copy")
            gradient.storage.belongs_to(Owner.GRADIENT)
            self.leaf.grad = gradient
        elif gradient is not None:
            stream = gradient.storage.stream
            tape.recorder.memory_bound("aten::add_", "elementwise", 3 * gradient.bytes, stream)
        if self.leaf.after_accumulate is not None:
            gradients.clear()
            del gradient
            self.leaf.after_accumulate(self.leaf)
        if self.leaf.post_hook is not None and tape.gradients_are_whole:
            self.leaf.post_hook(self.leaf)
        if tape.main_gradients is not None and tape.main_gradients.holds(self.leaf):
            del gradient
            gradients.clear()
            tape.main_gradients.accumulate(self.leaf)
        return []

    def release(self) -> None:
        pass


def gradient_edge(tensor: Tensor | None) -> Edge | None:
    """Where the gradient of this tensor goes; None if it needs none."""
    if tensor is None:
        return None
    if tensor.node is not None:
        return tensor.node, tensor.output_index
    if not tensor.requires_grad:
        return None
    accumulator = tensor.accumulator() if tensor.accumulator is not None else None
    if accumulator is None:
        accumulator = AccumulateGrad(tensor, tensor.storage.recorder.base)
        tensor.accumulator = weakref.ref(accumulator)
    return accumulator, 0


def run_backward(
    tape: Tape, root: Any, gradients: Gradients, put_off: Callable[[Any, Gradients], None] | None = None
) -> None:
    """Walk the tape back from `root`, highest sequence number first. `gradients` is emptied when root has run.

    `put_off`: the graph is kept for a second pass (retain_graph), and told each node with its gradients.
    """
    missing = _count_consumers(root)
    ready: list[tuple[int, int, Any, Gradients]] = [(-root.sequence, 0, root, gradients)]
    del gradients
    waiting: dict[Any, dict[int, Tensor]] = {}
    order = 0
    recorder = tape.recorder
    while ready:
        _, _, node, gradients = heapq.heappop(ready)
        recorder.enter_backward(node.base, node.op.number)
        if node.pre_hooks:
            for hook in node.pre_hooks:
                hook(gradients)
            recorder.enter_backward(node.base, node.op.number)
        if put_off is not None:
            put_off(node, gradients)
        results = node.backward(tape, gradients)
        for index, meta in enumerate(node.metas):
            if results[index] is not None and node.edges[index] is not None:
                results[index] = _fit(tape, results[index], meta)
        while gradients:
            gradients.pop(0)
        if put_off is None:
            node.release()
        for index, edge in enumerate(node.edges):
            if edge is None:
                continue
            consumer, slot = edge
            missing[consumer] -= 1
            _deliver(tape, waiting.setdefault(consumer, {}), slot, results, index)
            if not missing[consumer]:
                arrived = waiting.pop(consumer)
                order += 1
                slots = [arrived.get(i) for i in range(max(arrived, default=-1) + 1)]
                del arrived
                heapq.heappush(ready, (-consumer.sequence, order, consumer, slots))
                del slots
        while results:
            results.pop(0)


def _count_consumers(root: Any) -> dict[Any, int]:
    """How many edges lead to each node that can be reached."""
    missing: dict[Any, int] = {}
    seen, todo = {root}, [root]
    while todo:
        for edge in todo.pop().edges:
            if edge is not None:
                node = edge[0]
                missing[node] = missing.get(node, 0) + 1
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
    return missing


def _deliver(tape: Tape, buffer: dict[int, Tensor], slot: int, results: Gradients, index: int) -> None:
    """Move a gradient into its consumer's buffer; add where one is there already.

    In place iff nobody else holds the old gradient's storage (TAPE.md 2.3); else old + new in a fresh buffer.
    """
    gradient = results[index]
    if gradient is None:
        return
    if slot not in buffer:
        buffer[slot] = gradient
        results[index] = None
        return
    tape.recorder.operator(_ACCUMULATE)
    in_place = buffer[slot].storage.handles == 1
    if not in_place:
        buffer[slot] = tape.empty(gradient.shape, gradient.dtype, buffer[slot].strides)
    tape.launch_accumulation(buffer[slot], gradient, in_place)


def _fit(tape: Tape, gradient: Tensor | None, meta: tuple[Shape, str]) -> Tensor | None:
    """Engine::validate_outputs: sum to the input's shape, then cast to its dtype."""
    if gradient is None:
        return None
    shape, dtype = meta
    if gradient.shape != shape:
        gradient = tape.sum_to(gradient, shape)
    if gradient.dtype != dtype:
        gradient = tape.cast_copy(gradient, dtype)
    return gradient


_ACCUMULATE = Operators.number("aten::add (gradient accumulation)")
