"""Scored tables in one line each: how many rows, how far off, and why, for docs/validation.md."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median, quantiles

from ruamel.yaml import YAML

from sim.checks.scoring import RESULTS
from sim.checks.tables import Row, TableError

SHOWN_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSummary:
    """One scored table. Errors are of |predicted / published - 1|, None where nothing is compared."""

    name: str
    rows: int
    scored: int
    failed: int
    times: int
    time_median: float | None
    time_p90: float | None
    time_bias: float | None
    """Median of the signed error."""
    memories: int
    memory_median: float | None
    memory_p90: float | None
    memory_bias: float | None
    not_expressible: tuple[tuple[str, int], ...]
    """Reasons with the number of rows that name them, most frequent first."""
    why: str
    """Explanation of a systematic miss."""


def summarize_file(path: Path) -> FileSummary:
    """The summary of a scored CSV. Raises TableError, OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows: list[Row] = list(reader)
        if not set(RESULTS) <= set(reader.fieldnames or ()):
            raise TableError(f"{path}: no scored table: `python -m sim validate --table` writes them")
    times, memories = _errors(rows, "time_error"), _errors(rows, "memory_error")
    reasons = Counter(
        reason.split(":")[0]
        for row in rows
        if row["status"] == "not expressible"
        for reason in row["reason"].split("; ")
    )
    return FileSummary(
        name=path.stem,
        rows=len(rows),
        scored=sum(row["status"] == "scored" for row in rows),
        failed=sum(row["status"] == "failed" for row in rows),
        times=len(times),
        time_median=_median(times),
        time_p90=_p90(times),
        time_bias=median(times) if times else None,
        memories=len(memories),
        memory_median=_median(memories),
        memory_p90=_p90(memories),
        memory_bias=median(memories) if memories else None,
        not_expressible=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        why=explanations().get(path.stem, ""),
    )


def explanations() -> dict[str, str]:
    """Why the rows of a table miss together, by the table's name."""
    text = files("sim.checks").joinpath("explanations.yaml").read_text(encoding="utf-8")
    known: dict[str, str] = YAML(typ="safe", pure=True).load(text) or {}
    return known


def markdown(summaries: Sequence[FileSummary]) -> str:
    """A Markdown table, one line per file."""
    head = (
        "| table | rows | scored | time: rows, median, p90, bias | memory: rows, median, p90, bias | misses "
        "| not expressible |\n|---|---|---|---|---|---|---|"
    )
    lines = []
    for s in summaries:
        scored = f"{s.scored}" + (f" ({s.failed} failed)" if s.failed else "")
        time = _cell(s.times, s.time_median, s.time_p90, s.time_bias)
        memory = _cell(s.memories, s.memory_median, s.memory_p90, s.memory_bias)
        lines.append(f"| {s.name} | {s.rows} | {scored} | {time} | {memory} | {s.why} | {_reasons(s)} |")
    return "\n".join([head, *lines])


def _cell(count: int, middle: float | None, ninth: float | None, bias: float | None) -> str:
    if middle is None or ninth is None or bias is None:
        return ""
    return f"{count}, {middle:.1%}, {ninth:.1%}, {bias:+.1%}".replace("%", " %")


def _reasons(summary: FileSummary) -> str:
    named = [f"{reason} {count}" for reason, count in summary.not_expressible[:SHOWN_REASONS]]
    return ", ".join(named) + (", ..." if len(summary.not_expressible) > SHOWN_REASONS else "")


def _errors(rows: Sequence[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row["status"] == "scored" and row[column]]


def _median(errors: Sequence[float]) -> float | None:
    return median(map(abs, errors)) if errors else None


def _p90(errors: Sequence[float]) -> float | None:
    """The ninth decile of the sizes, between neighbours where it falls between."""
    sizes = [abs(error) for error in errors]
    if len(sizes) < 2:
        return sizes[0] if sizes else None
    return quantiles(sizes, n=10, method="inclusive")[-1]
