"""One screen: what each strategy costs, where its peak is, what is behind the figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.program.program import OWNER_LABELS, Owner
from sim.report.files import FILES
from sim.report.summary import OffloadSummary, OutOfMemory, RunSummary, StrategySummary
from sim.report.words import NOTHING, duration_of, duration_with_range, place, short_op, whole
from sim.units import format_bytes

PLAIN_WIDTH = 120
"""Columns where the output is no terminal and COLUMNS says nothing."""
TIGHT = 0.05
"""Less headroom than this share of the device is called tight."""
HIDDEN_SHARE = 0.01
"""Copies hide if less than this share of the step has a copy and no kernel."""
SHOWN_OWNERS, SHOWN_SHARE = 5, 0.01
"""So many owners of a peak are named, if they hold such a share of it."""
LONGEST_NAME = 28
"""Longer names of strategies are folded."""

GOOD, TIGHT_STYLE, BAD, DIM = "green", "yellow", "bold red", "dim"


def make_console(file: TextIO | None = None) -> Console:
    """A console for results: colours and the true width on a terminal, plain text elsewhere."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


def show_run(console: Console, run: RunSummary, folders: Sequence[Path] = ()) -> None:
    """The whole screen of one scenario; `folders` have been written."""
    console.print(headline(run), "")
    tables = (main_table, time_table, memory_table, offload_table)
    for table in (make(run.strategies) for make in tables):
        if len(table.columns) > 1:
            console.print(table, "")
    console.print(explanations(run.strategies), "")
    for line in footnotes(run):
        console.print(Text(line, style=DIM))
    for warning in run.warnings:
        console.print(Text(f"warning: {warning}", style=TIGHT_STYLE))
    if folders:
        names = f"{{{','.join(folder.name for folder in folders)}}}" if len(folders) > 1 else folders[0].name
        console.print(f"Files: {folders[0].parent}/{names}/ with {', '.join(FILES)}", soft_wrap=True)


def headline(run: RunSummary) -> Text:
    tokens = sorted({s.tokens_per_step for s in run.strategies if s.tokens_per_step})
    parts = [run.description or run.model, f"{run.gpus} x {run.gpu}"]
    parts += [f"{' or '.join(f'{count:,}' for count in tokens)} tokens/step"] if tokens else []
    return Text.assemble((run.scenario, "bold"), ": ", " | ".join(parts))


def main_table(strategies: Sequence[StrategySummary]) -> Table:
    """What decides: speed, memory, the cause of the peak, room left."""
    unit = Unit.of(strategies)
    return table_of(
        "strategy",
        strategies,
        Column("step", lambda s: duration_with_range(s.step_time_s, s.step_time_relative_sigma)),
        Column("tok/s/GPU", lambda s: whole(s.tokens_per_s_per_gpu)),
        Column("MFU", lambda s: percent(s.mfu)),
        Column(f"active {unit.name}", lambda s: unit.of_bytes(s.peak_active_bytes)),
        Column("reserved", lambda s: unit.of_bytes(s.peak_reserved_bytes)),
        Column("peak is in", lambda s: place(s.peak.phase, s.peak.layer), "left"),
        Column(_fits_heading(strategies), lambda s: verdict(s, unit), "left"),
    )


def time_table(strategies: Sequence[StrategySummary]) -> Table:
    """Where the step's time goes."""
    return table_of(
        "time",
        strategies,
        Column("first step", lambda s: duration_of(s.first_step.step_time_s)),
        Column("HFU", lambda s: percent(s.hfu)),
        Column("recompute", recomputed),
        Column("exposed comm.", lambda s: duration_of(s.exposed_communication_s)),
        Column("host-bound", lambda s: duration_of(s.host_bound_s)),
        Column("bubble", lambda s: percent(s.bubble_fraction)),
        Column("gathers", lambda s: whole(s.all_gathers or None)),
        Column("scatters", lambda s: whole(s.reduce_scatters or None)),
    )


def memory_table(strategies: Sequence[StrategySummary]) -> Table:
    """Peaks of the first step and, where they differ, of every later one."""
    unit = Unit.of(strategies)

    def both(peak: str) -> Callable[[StrategySummary], str]:
        return lambda s: unit.both(getattr(s.first_step, peak), getattr(s, peak))

    return table_of(
        f"{unit.name}, first > later steps",
        strategies,
        Column("allocated", both("peak_allocated_bytes")),
        Column("active", both("peak_active_bytes")),
        Column("reserved", both("peak_reserved_bytes")),
        Column("device use", both("peak_device_bytes")),
        Column("largest batch", lambda s: whole(s.largest_micro_batch)),
    )


def offload_table(strategies: Sequence[StrategySummary]) -> Table:
    """What moves to the host and back, and whether the step waits for it; empty where nothing does."""

    def shown(figure: Callable[[OffloadSummary], float | None], text: Callable[[float], str]) -> Cell:
        def cell(s: StrategySummary) -> str:
            value = figure(s.offload) if s.offload else None
            return NOTHING if value is None else text(value)

        return cell

    def amount(value: float) -> str:
        return format_bytes(int(value))

    def rate(value: float) -> str:
        return f"{value / 1e9:.1f}" if value else NOTHING

    return table_of(
        "offload",
        strategies,
        Column("to host", shown(lambda o: o.device_to_host_bytes, amount)),
        Column("GB/s", shown(lambda o: o.device_to_host_bytes_per_s, rate)),
        Column("back", shown(lambda o: o.host_to_device_bytes, amount)),
        Column("GB/s", shown(lambda o: o.host_to_device_bytes_per_s, rate)),
        Column("exposed", shown(lambda o: o.exposed_copies_s, duration_of)),
        Column("waits out", shown(lambda o: o.waits_for_leaving_s or None, duration_of)),
        Column("waits back", shown(lambda o: o.waits_for_fetched_s or None, duration_of)),
        Column("host/node", _host_memory),
    )


def _host_memory(s: StrategySummary) -> str | Text:
    """What all GPUs of a node hold in its main memory, of how much."""
    if s.offload is None:
        return NOTHING
    used, there = format_bytes(s.offload.node_host_bytes), format_bytes(s.offload.host_memory_bytes)
    return Text(f"{used} of {there}", style="" if s.offload.fits_host else BAD)


def _fits_heading(strategies: Sequence[StrategySummary]) -> str:
    usable = {s.usable_device_bytes for s in strategies}
    return f"fits {format_bytes(usable.pop())}" if len(usable) == 1 else "fits"


Cell = Callable[[StrategySummary], str | Text]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of every strategy under a heading."""

    heading: str
    cell: Cell
    justify: Literal["left", "right"] = "right"


def table_of(
    heading: str, strategies: Sequence[StrategySummary], *columns: Column, names: Sequence[str] | None = None
) -> Table:
    """One row per strategy, by its name or another; a column without any figure is left out."""
    names = names or [s.name for s in strategies]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    widest = max(len(name) for name in (heading, *names))
    table.add_column(heading, style="bold", overflow="fold", no_wrap=widest <= LONGEST_NAME)
    cells = []
    for column in columns:
        values = [column.cell(s) for s in strategies]
        if any(str(value) != NOTHING for value in values):
            table.add_column(column.heading, justify=column.justify, overflow="fold")
            cells.append(values)
    for row, name in enumerate(names):
        table.add_row(Text(name), *(values[row] for values in cells))
    return table


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit for all sizes of a table, small enough for the smallest peak."""

    name: str
    factor: int
    digits: int

    @classmethod
    def of(cls, strategies: Sequence[StrategySummary]) -> Unit:
        smallest = min(s.peak_active_bytes for s in strategies)
        if smallest < 1 << 30:
            return cls("MiB", 1 << 20, 0 if smallest >= 10 << 20 else 2)
        return cls("GiB", 1 << 30, 1 if smallest >= 10 << 30 else 2)

    def of_bytes(self, count: int) -> str:
        return f"{count / self.factor:,.{self.digits}f}"

    def both(self, first: int, later: int) -> str:
        """Of the first step and of later ones; once where they agree."""
        a, b = self.of_bytes(first), self.of_bytes(later)
        return b if a == b else f"{a} > {b}"


def recomputed(s: StrategySummary) -> str:
    again = s.recompute_overhead
    if again is None:
        return NOTHING
    return f"{again.of_forward:.0%} fwd, +{again.of_step:.0%} step" if again.of_forward else "none"


def verdict(s: StrategySummary, unit: Unit) -> Text:
    """Does it fit, and with what to spare."""
    room = unit.of_bytes(abs(s.headroom_bytes))
    if not s.fits:
        return Text(f"no, {room} short" if s.headroom_bytes < 0 else "no", style=BAD)
    if s.headroom_bytes < TIGHT * s.usable_device_bytes:
        return Text(f"barely, {room} left", style=TIGHT_STYLE)
    return Text(f"{room} left", style=GOOD)


def explanations(strategies: Sequence[StrategySummary]) -> Table:
    """A line or two per strategy, beside its name."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", overflow="fold", max_width=LONGEST_NAME)
    table.add_column(overflow="fold")
    unit = Unit.of(strategies)
    for s in strategies:
        table.add_row(Text(s.name), explanation(s, unit))
    return table


def explanation(s: StrategySummary, unit: Unit) -> Text:
    """Why the peak is what it is, who holds it, and what would lower it."""
    owners = list(s.peak.owners.items())
    shown = [(label, count) for label, count in owners[:SHOWN_OWNERS] if count >= SHOWN_SHARE * s.peak_active_bytes]
    held = [f"{label} {unit.of_bytes(count)}" for label, count in shown]
    rest = s.peak_active_bytes - sum(count for _, count in shown)
    held += [f"rest {unit.of_bytes(rest)}"] if rest >= SHOWN_SHARE * s.peak_active_bytes else []
    where = f"{s.worst_stage}, " if s.worst_stage else ""
    where += f"{place(s.peak.phase, s.peak.layer)}, {short_op(s.peak.op, s.peak.phase)}"
    verb = "peaks" if s.fits else "would peak"
    text = Text(f"{verb} at {unit.of_bytes(s.peak_active_bytes)} {unit.name} in {where}: {', '.join(held)}.")
    if s.lever is not None:
        then = place(s.lever.phase, s.lever.layer)
        measure = s.lever.measure[0].upper() + s.lever.measure[1:]
        text.append(f" {measure} can lower it to {unit.of_bytes(s.lever.peak_bytes)} at best (then {then}).")
    if s.oom is not None:
        text.append(" " + out_of_memory_text(s.oom), style=BAD)
    if s.offload is not None:
        text.append(offload_text(s.offload, s.step_time_s))
        if s.peak.owners.get(OWNER_LABELS[Owner.RECOMPUTED], 0):
            text.append(" This peak sits in a recomputation: offloading what its layer keeps does not lower it.")
    if s.offload is not None and not s.offload.fits_host:
        needed, there = format_bytes(s.offload.node_host_bytes), format_bytes(s.offload.host_memory_bytes)
        text.append(f" Host memory: {needed} per node is needed, {there} are there.", style=BAD)
    return text


def offload_text(offload: OffloadSummary, step_s: float | None) -> str:
    """Whether the copies hide, and what waits for them."""
    if offload.exposed_copies_s is None or step_s is None:
        return ""
    if offload.exposed_copies_s < HIDDEN_SHARE * step_s:
        return " Copies hide behind compute."
    waits = [
        f"{duration_of(waited)} {why}"
        for waited, why in (
            (offload.waits_for_leaving_s, "until tensors have left"),
            (offload.waits_for_fetched_s, "until tensors are back"),
        )
        if waited
    ]
    said = f": {', '.join(waits)}" if waits else ""
    return f" For {duration_of(offload.exposed_copies_s)} copies run and nothing computes{said}."


def out_of_memory_text(oom: OutOfMemory) -> str:
    step = {-1: "set-up", 0: "the first step"}.get(oom.step, f"step {oom.step + 1}")
    return (
        f"Out of memory in {step}, {place(oom.phase, oom.layer)} ({short_op(oom.op, oom.phase)}): tried to "
        f"allocate {format_bytes(oom.tried_bytes)} with {format_bytes(oom.device_free_bytes)} free, "
        f"{format_bytes(oom.allocated_bytes)} allocated, {format_bytes(oom.reserved_bytes)} reserved."
    )


def footnotes(run: RunSummary) -> Iterable[str]:
    """What the figures mean and how far to trust them; once where all strategies agree."""
    for label in dict.fromkeys(s.labels["bytes"] for s in run.strategies):
        yield f"Bytes and counts: {label.label}. {label.source}."
    for label in dict.fromkeys(s.labels["time"] for s in run.strategies):
        yield f"Times: {label.label}. {label.source}."
    yield from dict.fromkeys(_capacity(s) for s in run.strategies)
    yield from dict.fromkeys(_host(s) for s in run.strategies if s.offload is not None)
    if any(s.tokens_per_step for s in run.strategies):
        yield f"MFU: {run.mfu_formula}. HFU adds recomputed FLOPs."


def _capacity(s: StrategySummary) -> str:
    parts = [("Usable", s.usable_device_bytes, "usable_device_bytes"), ("context", s.context_bytes, "context_bytes")]
    if s.communicator_bytes:
        parts.append(("communicators", s.communicator_bytes, "communicator_bytes"))
    said = [
        f"{name} {format_bytes(count)} ({s.labels[key].label}: {s.labels[key].source})" for name, count, key in parts
    ]
    used = " + ".join(["reserved", *(name for name, _, _ in parts[1:])])
    return f"Device use: {used}. {'; '.join(said)}."


def _host(s: StrategySummary) -> str:
    label = s.labels["host_memory_bytes"]
    return f"Host memory of a node: {label.label}: {label.source}. Exposed: a copy runs and no kernel computes."


def percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{100 * fraction:.1f}%"
