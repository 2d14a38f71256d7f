"""`python -m sim diff`: tables of a simulated step and another, mostly a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from sim.checks.kineto import RankTrace, TraceError, read_traces
from sim.checks.trace_diff import Line, TraceDiff, slowest, trace_diff
from sim.report.errors import RunError
from sim.report.files import RANKS, TRACE
from sim.report.tables import Filled, tables
from sim.report.words import NOTHING
from sim.units import format_duration

SHOWN_SHARE = 0.001
"""Of a step: shorter families are left out of the table."""


def diff_of(run: Path, trace: Path) -> tuple[TraceDiff, list[str]]:
    """The figures, and what to know about them. Raises RunError."""
    try:
        other = _simulated(trace) if (trace / TRACE).is_file() else trace
        simulated, beside = read_traces(_simulated(run)), read_traces(other)
    except TraceError as error:
        raise RunError(str(error)) from None
    return trace_diff(simulated, beside), list(_remarks(simulated, beside))


def _simulated(run: Path) -> Path:
    """The traces of a strategy's folder: of every rank where they were written, else of the worst one."""
    if (run / RANKS).is_dir():
        return run / RANKS
    if (run / TRACE).is_file():
        return run / TRACE
    raise RunError(f"{run}: no {TRACE} in it: the folder of one strategy is expected, e.g. out/fsdp_ckpt/full")


def _remarks(simulated: Sequence[RankTrace], other: Sequence[RankTrace]) -> Iterator[str]:
    one = slowest(other)
    names = names_of("simulated" if one.simulated else "real")
    if one.device == "cpu":
        yield "The real trace has operators of a CPU and no kernels of a GPU: times are not comparable, counts are."
    if one.simulated:
        yield "Both traces were simulated."
    elif len(one.steps) < 3:
        yield f"The real trace holds {len(one.steps)} steps: warm steps are hardly in it."
    for name, ranks in zip(names, (simulated, other)):
        if len(ranks) > 1:
            yield f"Of {len(ranks)} {name} ranks the slowest is shown, rank {slowest(ranks).rank}."


def names_of(other: str) -> tuple[str, str]:
    """What the two columns are called."""
    return ("first", "second") if other == "simulated" else ("simulated", "real")


def show_diff(console: Console, diff: TraceDiff, remarks: Sequence[str]) -> None:
    """Parts of a step, families of kernels, what no family knows, remarks."""
    names = names_of(diff.other)
    parts = Filled("a step", [line.name for line in diff.parts], "left")
    for table in tables(parts, _columns(diff.parts, names), console.width):
        console.print(table, "")
    step = max(diff.parts[0].simulated_us, diff.parts[0].other_us)
    shown = [line for line in diff.families if max(line.simulated_us, line.other_us) >= SHOWN_SHARE * step]
    columns = [
        Filled(f"{names[0]} kernels", [f"{line.simulated_count:,}" for line in shown]),
        Filled(f"{names[1]} kernels", [f"{line.other_count:,}" for line in shown]),
        *_columns(shown, names),
    ]
    for table in tables(Filled("family", [line.name for line in shown], "left"), columns, console.width):
        console.print(table, "")
    for name, time in diff.unnamed:
        console.print(f"no family: {name}, {format_duration(time * 1e3)} a step", soft_wrap=True)
    console.print(f"Medians of {diff.steps[0]} {names[0]} and {diff.steps[1]} {names[1]} steps.")
    for remark in remarks:
        console.print(remark, soft_wrap=True)


def _columns(lines: Sequence[Line], names: tuple[str, str]) -> list[Filled]:
    return [
        Filled(names[0], [_time(line.simulated_us) for line in lines]),
        Filled(names[1], [_time(line.other_us) for line in lines]),
        Filled("difference", [NOTHING if line.difference is None else f"{line.difference:+.1%}" for line in lines]),
    ]


def _time(microseconds: float) -> str:
    return format_duration(microseconds * 1e3) if microseconds else NOTHING


def diff_json(diff: TraceDiff, remarks: Sequence[str]) -> str:
    """The same as JSON; differences are the first over the second less one, null where the second has none."""
    data = asdict(diff)
    for name in ("parts", "families"):
        for row, line in zip(data[name], getattr(diff, name)):
            row["difference"] = line.difference
    return json.dumps(data | {"remarks": list(remarks)}, indent=2)
