"""The loop's answer on a screen: predicted against measured, then the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from calibration.check.outcome import SLOWDOWN_TARGET, TIME_TARGET, Line, Outcome

MIB = 1 << 20
HEADINGS = (
    "predicted",
    "measured",
    "spread",
    "error",
    "slowdown",
    "measured",
    "error",
    "peak MiB",
    "measured",
    "bytes",
)


def show(console: Console, outcome: Outcome) -> None:
    machine = outcome.machine
    title = f"{machine['device']}, {machine['threads']} thread(s), torch {machine['torch']}: {outcome.rounds} rounds"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("network", "batch", "strategy"):
        table.add_column(name)
    for name in HEADINGS:
        table.add_column(name, justify="right")
    for line in outcome.lines:
        table.add_row(*_cells(line), style="dim" if line.control else "", end_section=line.control)
    console.print(table)
    for line in outcome.checked:
        if line.measured_reserved_bytes:
            reserved = (
                f"{line.predicted_reserved_bytes / MIB:.2f} MiB, measured {line.measured_reserved_bytes / MIB:.2f}"
            )
            console.print(f"reserved at the peak, {line.strategy}: {reserved}", highlight=False)
    for text in verdict(outcome):
        console.print(text, soft_wrap=True, highlight=False)


def _cells(line: Line) -> tuple[str, ...]:
    head = (line.network, str(line.batch), line.strategy)
    measured = (f"{line.measured_ns / 1e6:.1f} ms", f"{line.spread:.1%}")
    if line.control:
        return (*head, "", *measured, "", "", f"{line.measured_slowdown:.3f}", "", "", "", "")
    return (
        *head, f"{line.predicted_ns / 1e6:.1f} ms", *measured, f"{line.error:+.1%}", f"{line.predicted_slowdown:.3f}",
        f"{line.measured_slowdown:.3f}", f"{line.slowdown_error:+.1%}", f"{line.predicted_peak_bytes / MIB:.2f}",
        f"{line.measured_peak_bytes / MIB:.2f}", "equal" if line.bytes_equal else "DIFFER",
    )  # fmt: skip


def verdict(outcome: Outcome) -> list[str]:
    """A line per target, and what noise there was."""
    differ = [f"{line.network} {line.batch} {line.strategy}" for line in outcome.checked if not line.bytes_equal]
    slowdown, absolute = outcome.worst_slowdown_error, outcome.median_error
    host = ", ".join(f"{name.removesuffix('_us')} {value:.1f}" for name, value in outcome.host.items())
    found = [
        f"peak bytes: {'equal' if not differ else 'DIFFER: ' + ', '.join(differ)}",
        f"slowdown: within {slowdown:.1%} (target {SLOWDOWN_TARGET:.0%}): {_met(slowdown <= SLOWDOWN_TARGET)}",
        f"time: {absolute:.1%}, the median over strategies (target {TIME_TARGET:.0%}): {_met(absolute <= TIME_TARGET)}",
    ]
    if outcome.host:
        found += [
            f"control: plain against itself differs by up to {outcome.control_error:.1%}",
            f"host costs in us, learnt from other networks: {host}",
        ]
    if "traces" in outcome.machine:
        found.append(f"traces for python -m sim diff: {outcome.machine['traces']}")
    if not outcome.finished:
        found.append("Not all rounds were measured: with --keep the same command goes on.")
    return found


def _met(met: bool) -> str:
    return "met" if met else "missed"
