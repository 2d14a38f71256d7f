"""Figures of a played run by name, and arithmetic on them, so that a published case can say what it speaks of.

eight.peak_reserved_gib - many.peak_reserved_gib
mfu / tokens_per_s_per_gpu * 10643
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sim.api import Outcome
from sim.model.config import ModelConfig
from sim.model.flops import parameter_count
from sim.program.program import Owner
from sim.timeline.memory import MemoryTimeline

GIB = 2**30
STATES = (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER)
OWNED = {
    "parameters": (Owner.PARAMETER,),
    "gradients": (Owner.GRADIENT,),
    "optimizer": (Owner.OPTIMIZER,),
    "states": STATES,
    "activations": (Owner.ACTIVATION,),
    "checkpoints": (Owner.CHECKPOINT,),
    "logits": (Owner.LOSS,),
}
"""Names of groups of owners: `<name>_gib` is the most they hold together at any moment of the steady step,
`<name>_after_step_gib` what they hold when the optimizer is through, `largest_<name>_gib` their largest block."""


class FigureError(ValueError):
    """An expression that is no arithmetic on known figures."""


def figure_of(outcome: Outcome, name: str) -> float:
    """A figure of a run. Raises FigureError for an unknown name or a figure that this run lacks (no time: no fit)."""
    if name in SIMPLE:
        value = SIMPLE[name](outcome)
        if value is None:
            raise FigureError(f"{name}: the run does not fit, so there is no such figure")
        return float(value)
    for pattern, measure in OWNED_FIGURES.items():
        before, after = pattern.split("*")
        group = name.removeprefix(before).removesuffix(after)
        if group in OWNED and name == before + group + after:
            return measure(_shown(outcome), OWNED[group]) / GIB
    raise FigureError(f"{name}: no such figure; known: {', '.join(names())}")


def names() -> list[str]:
    """All names that figure_of takes."""
    return [*SIMPLE, *(pattern.replace("*", group) for pattern in OWNED_FIGURES for group in OWNED)]


def evaluate(expression: str, runs: Mapping[str, Outcome]) -> float:
    """Arithmetic and comparisons on `run.figure`; `figure` alone where there is one run. Truth is 1.0, else 0.0.

    Raises FigureError.
    """
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise FigureError(f"{expression}: no arithmetic") from None
    return _value(tree, runs)


def _value(node: ast.expr, runs: Mapping[str, Outcome]) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return float(ARITHMETIC[type(node.op)](_value(node.left, runs), _value(node.right, runs)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, runs)
    if isinstance(node, ast.Compare) and all(type(comparison) in COMPARISONS for comparison in node.ops):
        sides = [_value(side, runs) for side in (node.left, *node.comparators)]
        pairs = zip(node.ops, sides, sides[1:])
        return float(all(COMPARISONS[type(comparison)](a, b) for comparison, a, b in pairs))
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id not in runs:
            raise FigureError(f"{node.value.id}: no such run; there are {', '.join(runs)}")
        return figure_of(runs[node.value.id], node.attr)
    if isinstance(node, ast.Name) and len(runs) == 1:
        return figure_of(next(iter(runs.values())), node.id)
    raise FigureError(f"{ast.unparse(node)}: no arithmetic on figures of runs {', '.join(runs)}")


ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}


def _shown(outcome: Outcome) -> MemoryTimeline:
    return outcome.memory if outcome.fits else outcome.unlimited


def _most_held(memory: MemoryTimeline, owners: tuple[Owner, ...]) -> int:
    first, last = memory.steps()[-1]
    curves = memory.owner_curves()
    held = [curves[owner][first:last] for owner in owners if owner in curves]
    return int(np.sum(held, axis=0).max()) if held else 0


def _held_after_step(memory: MemoryTimeline, owners: tuple[Owner, ...]) -> int:
    step = len(memory.steps()) - 1
    event = memory.mark(f"s{step}.opt") or memory.played
    held = memory.owners_at(event - 1)
    return sum(held.get(owner, 0) for owner in owners)


def _largest(memory: MemoryTimeline, owners: tuple[Owner, ...]) -> int:
    sizes = memory.size_bytes[np.isin(memory.program.owners, [int(owner) for owner in owners])]
    return int(sizes.max(initial=0))


OWNED_FIGURES: dict[str, Callable[[MemoryTimeline, tuple[Owner, ...]], int]] = {
    "*_gib": _most_held,
    "*_after_step_gib": _held_after_step,
    "largest_*_gib": _largest,
}


def _collectives(outcome: Outcome, kind: str) -> int | None:
    return outcome.time.collectives.get(kind, 0) if outcome.time else None


def _parameters(outcome: Outcome) -> int | None:
    model = outcome.setup.model
    return parameter_count(model) if isinstance(model, ModelConfig) else None


SIMPLE: dict[str, Callable[[Outcome], float | None]] = {
    "step_time_s": lambda run: run.time.step_ns * 1e-9 if run.time else None,
    "tokens_per_s_per_gpu": lambda run: run.utilization.tokens_per_s_per_gpu if run.utilization else None,
    "samples_per_s_per_gpu": lambda run: run.utilization.samples_per_s_per_gpu if run.utilization else None,
    "mfu": lambda run: run.utilization.mfu if run.utilization else None,
    "hfu": lambda run: run.utilization.hfu if run.utilization else None,
    "recompute_of_step": lambda run: run.time.recompute_of_step if run.time else None,
    "recompute_of_forward": lambda run: run.time.recompute_of_forward if run.time else None,
    "cpu_step_s": lambda run: run.copies.cpu_step_ns * 1e-9 if run.copies else None,
    "exposed_communication_s": lambda run: run.time.exposed_communication_ns * 1e-9 if run.time else None,
    "all_gathers": lambda run: _collectives(run, "all_gather"),
    "reduce_scatters": lambda run: _collectives(run, "reduce_scatter"),
    "all_reduces": lambda run: _collectives(run, "all_reduce"),
    "peak_allocated_gib": lambda run: run.steady.allocated_bytes / GIB,
    "peak_active_gib": lambda run: run.steady.active_bytes / GIB,
    "peak_reserved_gib": lambda run: run.steady.reserved_bytes / GIB,
    "device_gib": lambda run: run.steady.device_bytes / GIB,
    "usable_gib": lambda run: run.setup.cluster.usable_memory_bytes / GIB,
    "parameters": _parameters,
}
