"""What the cost profiles say, as tables: which exist, their figures, how long one piece of work takes."""

from __future__ import annotations

from rich.table import Table

from sim.cost.listing import Answer, FigureRow, ProfileRow, TransferAnswer
from sim.report.catalogues import plain_table
from sim.units import format_bandwidth, format_bytes, format_compute, format_duration


def profile_table(rows: list[ProfileRow]) -> Table:
    """All profiles: the sustained GEMM rate with its spread, and what the figures rest on."""
    table = plain_table("profile", "GEMM rate", "share of peak", "figures", "for")
    for row in rows:
        labels = ", ".join(f"{count} {label}" for label, count in row.labels)
        rate = format_compute(row.gemm_flops_per_s) if row.gemm_flops_per_s else "-"
        share = f"{row.gemm_efficiency:.2f} ±{row.gemm_sigma:.0%}"
        table.add_row(row.name, rate, share, labels, ", ".join(row.gpus) or row.description)
    return table


def figure_table(rows: list[FigureRow]) -> Table:
    """Figures of one profile with label, spread and source."""
    table = plain_table("figure", "value", "spread", "label", "source")
    for row in rows:
        table.add_row(row.name, f"{row.value:g}", f"±{row.relative_sigma:.0%}", row.label, row.source)
    return table


def kernel_table(answer: Answer) -> Table:
    """One kernel: its time, what bounds it, the parts of its form."""
    low, high = answer.range_ns
    explanation = answer.explanation
    table = _pairs()
    table.add_row("time", f"{format_duration(answer.ns)} (range {format_duration(low)} to {format_duration(high)})")
    table.add_row("bound by", answer.bound)
    share = f"{answer.peak_share:.0%} of the {answer.peak_name}"
    table.add_row("rate", f"{format_compute(answer.flops_per_s)}, {share}")
    table.add_row("memory", format_bandwidth(answer.bytes_per_s))
    beside = ", ".join(format_duration(ns) for ns in explanation.level_ns)
    table.add_row("alone, beside copies, beside collectives", beside)
    for name, value in explanation.parts.items():
        table.add_row(f"{explanation.form}: {name}", f"{value:,.6g}" if isinstance(value, float) else str(value))
    for name, figure in explanation.figures.items():
        table.add_row(name, f"{figure.value:g} ({figure.label}: {figure.source})")
    return table


def transfer_table(answer: TransferAnswer) -> Table:
    """One collective or copy."""
    low, high = answer.range_ns
    table = _pairs()
    table.add_row("time", f"{format_duration(answer.ns)} (range {format_duration(low)} to {format_duration(high)})")
    table.add_row("bytes on the link", format_bytes(answer.bytes))
    table.add_row("at most", format_bandwidth(answer.cap_bytes_per_s))
    table.add_row("latency", format_duration(answer.latency_ns))
    for name, value in answer.parts:
        table.add_row(name, f"{value:,.6g}" if isinstance(value, float) else str(value))
    return table


def _pairs() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    return table
