"""One screen: what each strategy costs, where its peak is, what is behind the figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.report.evidence import Evidence
from sim.report.files import FILES
from sim.report.offload import host_footnote, offload_columns, offload_explanation
from sim.report.summary import OutOfMemory, RunSummary, StrategySummary
from sim.report.tables import LONGEST_NAME, Column, strategy_tables
from sim.report.words import (
    ASCII,
    NOTHING,
    UNICODE,
    Signs,
    duration_of,
    duration_with_range,
    place,
    short_op,
    whole,
)
from sim.units import format_bytes

PLAIN_WIDTH = 120
"""Columns where the output is no terminal and COLUMNS says nothing."""
TIGHT = 0.05
"""Less headroom than this share of the device is called tight."""
SHOWN_OWNERS, SHOWN_SHARE = 5, 0.01
"""So many owners of a peak are named, if they hold such a share of it."""

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
    signs = ASCII if console.options.ascii_only else UNICODE
    for heading, columns in (
        ("strategy", main_columns(run.strategies, signs)),
        ("time", TIME_COLUMNS),
        (f"{Unit.of(run.strategies).name}, first {signs.arrow} later", memory_columns(run.strategies, signs)),
        ("offload", offload_columns(BAD)),
    ):
        for table in strategy_tables(heading, run.strategies, columns, console.width):
            console.print(table, "")
    console.print(explanations(run.strategies), "")
    for note in run.notes:
        console.print(note)
    if run.notes:
        console.print()
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
    return Text.assemble((run.title, "bold"), ": ", " | ".join(parts))


def main_columns(strategies: Sequence[StrategySummary], signs: Signs) -> list[Column]:
    """What decides: speed, memory, the cause of the peak, room left."""
    unit = Unit.of(strategies)
    return [
        Column("step", lambda s: duration_with_range(s.step_time_s, s.step_time_relative_sigma, signs)),
        Column("tok/s/GPU", lambda s: whole(s.tokens_per_s_per_gpu)),
        Column("MFU", lambda s: percent(s.mfu)),
        Column(f"active {unit.name}", lambda s: unit.of_bytes(s.peak_active_bytes)),
        Column("reserved", lambda s: unit.of_bytes(s.peak_reserved_bytes)),
        Column("peak is in", lambda s: place(s.peak.phase, s.peak.layer), "left"),
        Column(_fits_heading(strategies), lambda s: verdict(s, unit), "left"),
    ]


TIME_COLUMNS = (
    Column("first step", lambda s: duration_of(s.first_step.step_time_s)),
    Column("samples/s/GPU", lambda s: "" if s.samples_per_s_per_gpu is None else f"{s.samples_per_s_per_gpu:,.4g}"),
    Column("HFU", lambda s: percent(s.hfu)),
    Column("recompute", lambda s: recomputed(s)),
    Column("exposed comm.", lambda s: duration_of(s.exposed_communication_s)),
    Column("host-bound", lambda s: duration_of(s.host_bound_s)),
    Column("bubble", lambda s: percent(s.bubble_fraction)),
    Column("gathers", lambda s: whole(s.all_gathers or None)),
    Column("scatters", lambda s: whole(s.reduce_scatters or None)),
)
"""Where the step's time goes."""


def memory_columns(strategies: Sequence[StrategySummary], signs: Signs) -> list[Column]:
    """Peaks of the first step and, where they differ, of every later one."""
    unit = Unit.of(strategies)

    def both(peak: str) -> Callable[[StrategySummary], str]:
        return lambda s: unit.both(getattr(s.first_step, peak), getattr(s, peak), signs)

    return [
        Column("allocated", both("peak_allocated_bytes")),
        Column("active", both("peak_active_bytes")),
        Column("reserved", both("peak_reserved_bytes")),
        Column("device use", both("peak_device_bytes")),
        Column("largest batch", largest_batch),
    ]


def largest_batch(s: StrategySummary) -> str:
    least = ">= " if s.largest_micro_batch_is_lower_bound else ""
    return f"{least}{whole(s.largest_micro_batch)}"


def _fits_heading(strategies: Sequence[StrategySummary]) -> str:
    usable = {s.usable_device_bytes for s in strategies}
    return f"fits {format_bytes(usable.pop())}" if len(usable) == 1 else "fits"


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

    def both(self, first: int, later: int, signs: Signs) -> str:
        """Of the first step and of later ones; once where they agree."""
        a, b = self.of_bytes(first), self.of_bytes(later)
        return b if a == b else f"{a} {signs.arrow} {b}"


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
    for note in s.notes:
        text.append(f" {note}")
    if s.oom is not None:
        text.append(" " + out_of_memory_text(s.oom), style=BAD)
    text.append(offload_explanation(s, BAD))
    return text


def out_of_memory_text(oom: OutOfMemory) -> str:
    step = {-1: "set-up", 0: "the first step"}.get(oom.step, f"step {oom.step + 1}")
    return (
        f"Out of memory in {step}, {place(oom.phase, oom.layer)} ({short_op(oom.op, oom.phase)}): tried to "
        f"allocate {format_bytes(oom.tried_bytes)} with {format_bytes(oom.device_free_bytes)} free, "
        f"{format_bytes(oom.allocated_bytes)} allocated, {format_bytes(oom.reserved_bytes)} reserved."
    )


def footnotes(run: RunSummary) -> Iterator[str]:
    """What the figures mean and how far to trust them; once where all strategies agree."""
    yield from _said_once(run.strategies, lambda s: _evidence("Bytes and counts", s.labels["bytes"]))
    yield from _said_once(run.strategies, lambda s: _evidence("Times", s.labels["time"]))
    yield from _parameter_bytes(run.strategies)
    yield from _said_once(run.strategies, _capacity)
    yield from dict.fromkeys(host_footnote(s) for s in run.strategies if s.offload is not None)
    if any(s.tokens_per_step for s in run.strategies):
        yield f"MFU: {run.mfu_formula}. HFU adds recomputed FLOPs."


def _said_once(strategies: Sequence[StrategySummary], text: Callable[[StrategySummary], str]) -> Iterator[str]:
    """A text per group of strategies that share it; where there are several, it says whom it is about."""
    groups: dict[str, list[str]] = {}
    for s in strategies:
        groups.setdefault(text(s), []).append(s.name)
    for said, names in groups.items():
        yield said if len(groups) == 1 else f"{', '.join(names)}: {said}"


def _evidence(what: str, evidence: Evidence) -> str:
    return f"{what}: {evidence.label}. {evidence.source}."


def _parameter_bytes(strategies: Sequence[StrategySummary]) -> Iterator[str]:
    """One line per recipe, with the strategies that follow it where there are several."""
    recipes: dict[str, list[str]] = {}
    for s in strategies:
        if s.bytes_per_parameter:
            parts = ", ".join(f"{name} {count:.3g}" for name, count in s.bytes_per_parameter.items())
            recipes.setdefault(f"{sum(s.bytes_per_parameter.values()):.3g} B ({parts})", []).append(s.name)
    most = max(recipes, key=lambda recipe: len(recipes[recipe]), default="")
    said = [recipe if recipe == most else f"{recipe} in {', '.join(names)}" for recipe, names in recipes.items()]
    if said:
        yield f"Per trained parameter: {'; '.join(said)}."


def _capacity(s: StrategySummary) -> str:
    parts = [("Usable", s.usable_device_bytes, "usable_device_bytes"), ("context", s.context_bytes, "context_bytes")]
    if s.communicator_bytes:
        parts.append(("communicators", s.communicator_bytes, "communicator_bytes"))
    said = [
        f"{name} {format_bytes(count)} ({s.labels[key].label}: {s.labels[key].source})" for name, count, key in parts
    ]
    used = " + ".join(["reserved", *(name for name, _, _ in parts[1:])])
    return f"Device use: {used}. {'; '.join(said)}."


def percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{100 * fraction:.1f}%"
