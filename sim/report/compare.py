"""Strategies of several scenarios or runs side by side: deltas against the first, and one figure of all curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from sim.api import load
from sim.report.bound import bound_by
from sim.report.console import BAD, GOOD, Unit, verdict
from sim.report.errors import cannot_write
from sim.report.figure import compare_figure, save
from sim.report.files import write_atomically
from sim.report.picture import Picture
from sim.report.read import read_run
from sim.report.runner import Task, play_all
from sim.report.summary import StrategySummary
from sim.report.tables import Cell, Column, strategy_tables
from sim.report.words import NOTHING, duration_of, whole
from sim.scenario.problems import Problem, ScenarioError
from sim.units import format_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One strategy of a comparison; no picture where there is nothing to draw."""

    scenario: str
    summary: StrategySummary
    picture: Picture | None
    source: Path
    """Run folder or scenario file, without its ending."""


def gather(paths: Sequence[Path], jobs: int | None = None) -> list[Entry]:
    """Entries of scenario files (played now, all in one go), run folders and summary files, in the order given.

    Raises ScenarioError with the problems of all scenarios, RunError for the rest.
    """
    read: list[tuple[list[Entry], list[Task]]] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            read.append(_read(path))
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(problems)
    tasks = [task for _, found in read for task in found]
    answers = iter(play_all(tasks, jobs))
    entries: list[Entry] = []
    for known, found in read:
        entries += known
        for task, answer in zip(found, answers):
            source = task.scenario.path.with_suffix("") if task.scenario.path else Path(task.scenario.name)
            entries.append(Entry(task.scenario.title, answer.summary, answer.picture, source))
    return entries


def _read(path: Path) -> tuple[list[Entry], list[Task]]:
    """What a path stands for: entries that are known already, and tasks to play."""
    if path.is_dir() or path.suffix == ".json":
        return [Entry(*read) for read in read_run(path)], []
    scenario = load(path)
    return [], [Task(scenario=scenario, setup=setup, picture=True, search=False) for setup in scenario.strategies]


def compare_tables(entries: Sequence[Entry], width: int) -> list[Table]:
    """One row per strategy; differences are against the first row."""
    strategies = [entry.summary for entry in entries]
    unit = Unit.of(strategies)
    first = strategies[0]

    def relative(
        figure: Callable[[StrategySummary], float | None], shown: Callable[[float | None], str], less_is_good: bool
    ) -> Callable[[StrategySummary], Cell]:
        def cell(s: StrategySummary) -> Cell:
            value, base = figure(s), figure(first)
            if value is None or not base or s is first:
                return shown(value)
            return coloured(shown(value), f"{value / base - 1:+.1%}", value - base, less_is_good)

        return cell

    def more(figure: Callable[[StrategySummary], int]) -> Callable[[StrategySummary], Cell]:
        def cell(s: StrategySummary) -> Cell:
            size, change = unit.of_bytes(figure(s)), figure(s) - figure(first)
            return size if s is first else coloured(size, _signed(change, unit), change, less_is_good=True)

        return cell

    columns = [
        Column("step", relative(lambda s: s.step_time_s, duration_of, less_is_good=True)),
        Column("tok/s/GPU", relative(lambda s: s.tokens_per_s_per_gpu, whole, less_is_good=False)),
        Column(f"active {unit.name}", more(lambda s: s.peak_active_bytes)),
        Column("reserved", more(lambda s: s.peak_reserved_bytes)),
        Column("recompute", _recompute),
        Column("bound by", bound_by, "left"),
        Column("fits", lambda s: verdict(s, unit), "left"),
    ]
    return strategy_tables("strategy", strategies, columns, width, entry_names(entries))


def coloured(figure: str, change: str, difference: float, less_is_good: bool) -> Text:
    """A figure and its change: green where it is for the better, red where not."""
    if not difference:
        return Text(f"{figure} {change}")
    return Text.assemble(f"{figure} ", (change, GOOD if (difference < 0) == less_is_good else BAD))


def _signed(count: int, unit: Unit) -> str:
    return f"{'-' if count < 0 else '+'}{unit.of_bytes(abs(count))}"


def _recompute(s: StrategySummary) -> str:
    again = s.recompute_overhead
    return f"+{again.of_step:.1%}" if again is not None and again.of_step else NOTHING


def entry_names(entries: Sequence[Entry]) -> list[str]:
    """Strategy names: with the scenario's where there are several, with the folder's where those are alike too."""
    several = len({entry.scenario for entry in entries}) > 1
    names = [f"{e.scenario}/{e.summary.name}" if several else e.summary.name for e in entries]
    if len(set(names)) < len(names):
        names = [f"{e.source}/{e.summary.name}" for e in entries]
    earlier: Counter[str] = Counter()
    for number, name in enumerate(names):
        earlier[name] += 1
        if earlier[name] > 1:
            names[number] = f"{name} ({earlier[name]})"
    return names


def token_warning(entries: Sequence[Entry]) -> str | None:
    """Step times of different amounts of work must not be compared."""
    counts = {entry.summary.tokens_per_step for entry in entries} - {None}
    if len(counts) < 2:
        return None
    listed = ", ".join(f"{count:,}" for count in sorted(c for c in counts if c is not None))
    return f"warning: tokens per step differ ({listed}): compare tokens/s/GPU, not step times"


def write_comparison(out: Path, entries: Sequence[Entry], form: Literal["png", "svg"] = "png") -> Path | None:
    """Write compare.png (or .svg) with every entry that has a picture; returns its path. Raises RunError."""
    named = zip(entry_names(entries), entries)
    cells = [(cell_title(name, entry), entry.picture) for name, entry in named if entry.picture is not None]
    if not cells:
        return None
    path = out / f"compare.{form}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: save(compare_figure(cells), file, form))
    except OSError as error:
        raise cannot_write(error, path) from None
    return path


def cell_title(name: str, entry: Entry) -> str:
    """Above a curve: name, step time, peak."""
    s = entry.summary
    if not s.fits:
        return f"{name}: does not fit, would peak at {format_bytes(s.peak_active_bytes)}"
    return f"{name}: step {duration_of(s.step_time_s)}, peak {format_bytes(s.peak_active_bytes)}"
