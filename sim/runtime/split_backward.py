"""Backward in two passes: first the gradient of a stage's input, which the stage before waits for; weights later.

As torch.distributed.pipelining's stage_backward_input and stage_backward_weight: the first pass computes no gradient of
a weight and keeps the graph with all that it saved, and the gradient that reached each node with weights; the second
runs those nodes again for their weights alone, and lets go.
"""

from __future__ import annotations

from typing import Any

from sim.runtime.autograd import Edge, Gradients, run_backward
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class SplitBackward:
    """The backward of one micro-batch in one stage, whose input is `leaf`."""

    def __init__(self, tape: Tape, output: Tensor, leaf: Tensor) -> None:
        self.tape = tape
        self.output = output
        self.leaf = leaf
        self._weights: dict[Any, list[Edge | None]] = {}
        self._put_off: list[tuple[Any, Gradients, list[Edge | None]]] = []
        self._graph: list[Any] = []

    def input_gradient(self, gradient: Tensor | None) -> None:
        """First pass: `leaf.grad`. `gradient` is that of the output; None: the output is the loss."""
        self._part_edges()
        self.tape.splits = "input"
        self.tape.backward(self.output, gradient, self._walk_for_input)
        self.tape.splits = None

    def weight_gradients(self) -> None:
        """Second pass."""
        self.tape.splits = "weight"
        self.tape.backward(self.output, self.output, self._walk_for_weights)
        self.tape.splits = None
        for node in self._graph:
            node.release()
        self._graph = []

    def _part_edges(self) -> None:
        """Nodes keep the edges that lead to the input; those that lead to weights alone are put aside."""
        target = self.leaf.accumulator() if self.leaf.accumulator is not None else None
        order = _consumers_first(self.output.node)
        leads = {target}
        for node in reversed(order):
            if any(edge is not None and edge[0] in leads for edge in node.edges):
                leads.add(node)
        self._graph = [node for node in order if node in leads and node is not target]
        for node in self._graph:
            weights = [edge if edge is not None and edge[0] not in leads else None for edge in node.edges]
            if any(weights) or node.op.splits:
                self._weights[node] = weights
                node.edges = [edge if edge is not None and edge[0] in leads else None for edge in node.edges]

    def _walk_for_input(self, root: Any, gradients: Gradients) -> None:
        def put_off(node: Any, reached: Gradients) -> None:
            weights = self._weights.get(node)
            if weights is not None:
                kept = [gradient.detach() if gradient is not None else None for gradient in reached]
                self._put_off.append((node, kept, weights))

        run_backward(self.tape, root, gradients, put_off)

    def _walk_for_weights(self, root: Any, gradients: Gradients) -> None:
        while self._put_off:
            node, kept, weights = self._put_off.pop(0)
            node.edges = weights
            run_backward(self.tape, node, kept)


def _consumers_first(root: Any) -> list[Any]:
    """Every node that can be reached, each after all that use its result."""
    order: list[Any] = []
    seen = {root}
    todo: list[tuple[Any, int]] = [(root, 0)]
    while todo:
        node, index = todo.pop()
        if index < len(node.edges):
            todo.append((node, index + 1))
            edge = node.edges[index]
            if edge is not None and edge[0] not in seen:
                seen.add(edge[0])
                todo.append((edge[0], 0))
        else:
            order.append(node)
    return order[::-1]
