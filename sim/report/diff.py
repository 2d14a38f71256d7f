"""`python -m sim diff`: tables of a simulated and a real step."""

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
        simulated, real = read_traces(_simulated(run)), read_traces(other)
    except TraceError as error:
        raise RunError(str(error)) from None
    return trace_diff(simulated, real), list(_remarks(simulated, real))


def _simulated(run: Path) -> Path:
    """The traces of a strategy's folder: of every rank where they were written, else of the worst one."""
    if (run / RANKS).is_dir():
        return run / RANKS
    if (run / TRACE).is_file():
        return run / TRACE
    raise RunError(f"{run}: no {TRACE} in it: the folder of one strategy is expected, e.g. out/fsdp_ckpt/full")


def _remarks(simulated: Sequence[RankTrace], real: Sequence[RankTrace]) -> Iterator[str]:
    one = slowest(real)
    if one.device == "cpu":
        yield "The real trace has operators of a CPU and no kernels of a GPU: times are not comparable, counts are."
    if one.simulated:
        yield "The trace beside it was simulated too."
    elif len(one.steps) < 3:
        yield f"The real trace holds {len(one.steps)} steps: warm steps are hardly in it."
    if len(real) > 1:
        yield f"Of {len(real)} real ranks the slowest is shown, rank {one.rank}."
    if len(simulated) > 1:
        yield f"Of {len(simulated)} simulated ranks the slowest is shown, rank {slowest(simulated).rank}."


def show_diff(console: Console, diff: TraceDiff, remarks: Sequence[str]) -> None:
    """Parts of a step, families of kernels, what no family knows, remarks."""
    for table in tables(
        Filled("a step", [line.name for line in diff.parts], "left"), _columns(diff.parts), console.width
    ):
        console.print(table, "")
    step = max(diff.parts[0].simulated_us, diff.parts[0].real_us)
    shown = [line for line in diff.families if max(line.simulated_us, line.real_us) >= SHOWN_SHARE * step]
    columns = [
        Filled("simulated kernels", [f"{line.simulated_count:,}" for line in shown]),
        Filled("real kernels", [f"{line.real_count:,}" for line in shown]),
        *_columns(shown),
    ]
    for table in tables(Filled("family", [line.name for line in shown], "left"), columns, console.width):
        console.print(table, "")
    for name, time in diff.unnamed:
        console.print(f"no family: {name}, {format_duration(time * 1e3)} a step", soft_wrap=True)
    console.print(f"Medians of {diff.steps[0]} simulated and {diff.steps[1]} real steps.")
    for remark in remarks:
        console.print(remark, soft_wrap=True)


def _columns(lines: Sequence[Line]) -> list[Filled]:
    return [
        Filled("simulated", [_time(line.simulated_us) for line in lines]),
        Filled("real", [_time(line.real_us) for line in lines]),
        Filled("difference", [NOTHING if line.difference is None else f"{line.difference:+.1%}" for line in lines]),
    ]


def _time(microseconds: float) -> str:
    return format_duration(microseconds * 1e3) if microseconds else NOTHING


def diff_json(diff: TraceDiff, remarks: Sequence[str]) -> str:
    """The same as JSON; differences are simulated over real less one, null where the real run has none."""
    data = asdict(diff)
    for name in ("parts", "families"):
        for row, line in zip(data[name], getattr(diff, name)):
            row["difference"] = line.difference
    return json.dumps(data | {"remarks": list(remarks)}, indent=2)
