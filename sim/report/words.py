"""Figures and places in the words that people use."""

from __future__ import annotations

from dataclasses import dataclass

from sim.units import format_duration

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs that not every terminal has."""

    arrow: str
    spread: str


UNICODE, ASCII = Signs("→", "±"), Signs("to", "+-")


def place(phase: str, layer: str) -> str:
    """ "backward" of "loss" -> "loss backward"; the root has no name."""
    return phase if layer == phase else f"{layer} {phase}".strip()


def short_op(op: str, phase: str) -> str:
    """The half of "aten.mm (MmBackward0)" that runs in the phase."""
    forward, _, backward = op.partition(" (")
    if not op:
        return "no operator"
    return backward.rstrip(")") if backward and phase == "backward" else forward


def duration_of(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_duration(seconds * 1e9)


def duration_with_range(seconds: float | None, relative_sigma: float | None, signs: Signs = UNICODE) -> str:
    """935 ms ±6%: the range that the sources of the cost profile leave."""
    if not relative_sigma:
        return duration_of(seconds)
    return f"{duration_of(seconds)} {signs.spread}{relative_sigma * 100:.0f}%"


def whole(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"
