"""Checkpointing by hand: a chain of layers h -> tanh(h W) in NumPy, backward with and without recomputation.

    python notebooks/labs/lab.py --layers 12 --segment 3

Keeping everything, backward needs every layer's input and the last output: layers + 1 arrays. In segments it keeps each
segment's input and the last output, and recomputes one segment at a time: layers / segment + 1 + segment arrays at most.
Prints PASS if outputs and gradients of both agree, gradients are those of central differences, and the counts are these.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
WIDTH, ROWS = 6, 4
STEP, TOLERANCE = 1e-5, 1e-7


@dataclass
class Kept:
    """Arrays that are alive, and the most there ever were at once."""

    alive: dict[int, Array] = field(default_factory=dict)
    most: int = 0

    def keep(self, layer: int, h: Array) -> None:
        """Keep the input of `layer` (the last output counts as the input of the layer after the last)."""
        self.alive[layer] = h
        self.most = max(self.most, len(self.alive))


def forward(weights: list[Array], h: Array) -> Array:
    """The output alone; nothing is kept."""
    for weight in weights:
        h = np.tanh(h @ weight)
    return h


def loss(weights: list[Array], x: Array) -> float:
    """Half the sum of squares of the output; its gradient is the output."""
    return float(0.5 * np.sum(forward(weights, x) ** 2))


def layer_backward(weight: Array, h: Array, out: Array, gradient: Array) -> tuple[Array, Array]:
    """Gradients of a layer's weight and input, from its input, its output and the output's gradient."""
    before = gradient * (1 - out**2)
    return h.T @ before, before @ weight.T


def keep_all(weights: list[Array], x: Array) -> tuple[Array, list[Array], int]:
    """Output, gradients of all weights, most arrays alive."""
    kept = Kept()
    kept.keep(0, x)
    for layer, weight in enumerate(weights):
        kept.keep(layer + 1, np.tanh(kept.alive[layer] @ weight))
    output = kept.alive[len(weights)]
    gradient, gradients = output, []
    for layer in reversed(range(len(weights))):
        of_weight, gradient = layer_backward(weights[layer], kept.alive[layer], kept.alive[layer + 1], gradient)
        gradients.insert(0, of_weight)
    return output, gradients, kept.most


def in_segments(weights: list[Array], x: Array, segment: int) -> tuple[Array, list[Array], int, int]:
    """Output, gradients, most arrays alive, layers run a second time."""
    inputs, h = Kept(), x
    for layer, weight in enumerate(weights):
        if layer % segment == 0:
            inputs.keep(layer, h)
        h = np.tanh(h @ weight)
    inputs.keep(len(weights), h)
    gradient, gradients, most, recomputed = h, list[Array](), inputs.most, 0
    for first in reversed(range(0, len(weights), segment)):
        last = min(first + segment, len(weights))
        inside = [inputs.alive[first]]
        for weight in weights[first:last]:
            inside.append(np.tanh(inside[-1] @ weight))
            recomputed += 1
        most = max(most, len(inputs.alive) + len(inside) - 1)  # the first of them is kept already
        for layer in reversed(range(first, last)):
            of_weight, gradient = layer_backward(
                weights[layer], inside[layer - first], inside[layer - first + 1], gradient
            )
            gradients.insert(0, of_weight)
        del inputs.alive[first]
    return h, gradients, most, recomputed


def worst_difference(weights: list[Array], x: Array, gradients: list[Array]) -> float:
    """Largest difference between the gradients and central differences of the loss, over some entries of each weight."""
    worst = 0.0
    for weight, gradient in zip(weights, gradients):
        for place in ((0, 0), (1, 2), (WIDTH - 1, WIDTH - 1)):
            before = weight[place]
            weight[place] = before + STEP
            above = loss(weights, x)
            weight[place] = before - STEP
            below = loss(weights, x)
            weight[place] = before
            worst = max(worst, abs((above - below) / (2 * STEP) - gradient[place]))
    return worst


def check(layers: int, segment: int) -> list[tuple[str, bool]]:
    """What must be true, and whether it is."""
    random = np.random.default_rng(0)
    weights = [random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)) for _ in range(layers)]
    x = random.normal(size=(ROWS, WIDTH))
    output, gradients, all_alive = keep_all(weights, x)
    again, others, alive, recomputed = in_segments(weights, x, segment)
    difference = worst_difference(weights, x, others)
    expected = -(-layers // segment) + 1 + min(segment, layers)
    return [
        ("outputs are equal", bool(np.array_equal(output, again))),
        ("gradients are equal", all(np.array_equal(a, b) for a, b in zip(gradients, others))),
        (f"central differences agree: {difference:.1e} < {TOLERANCE:.0e}", difference < TOLERANCE),
        (f"keeping everything: {all_alive} arrays alive", all_alive == layers + 1),
        (f"segments of {segment}: {alive} arrays alive", alive <= expected),
        (f"{recomputed} layers recomputed", recomputed == layers),
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if everything holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--segment", type=int, default=3, help="layers per segment")
    asked = parser.parse_args(arguments)
    if asked.layers < 1 or not 1 <= asked.segment <= asked.layers:
        parser.error("at least one layer, and segments of 1 to that many layers, are expected")
    checks = check(asked.layers, asked.segment)
    for text, holds in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {text}")
    passed = all(holds for _, holds in checks)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
