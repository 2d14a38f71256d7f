"""Reads back what a run has left: summary.json, and the tables beside it as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter, ValidationError

from sim.program.program import STREAM_NAMES, Ints, Phase
from sim.report.errors import RunError
from sim.report.files import KERNELS, MEMORY, SUMMARY
from sim.report.picture import Picture, Work, stream_lanes, thinned
from sim.report.summary import RunSummary, StrategySummary
from sim.report.words import place, short_op

if TYPE_CHECKING:
    import pyarrow as pa


def read_run(path: Path) -> list[tuple[str, StrategySummary, Picture | None]]:
    """Scenario, figures and picture of every strategy in a run's folder, a strategy's folder, or a summary file.

    Raises RunError.
    """
    file = path / SUMMARY if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise RunError(f"{path}: no {SUMMARY} in it: the folder of a run or of a strategy is expected")
    run = read_summary(file)
    folder = file.parent
    if (folder / MEMORY).is_file():
        return [(run.scenario, s, read_picture(folder, s)) for s in run.strategies]
    folders = {s.name: inside.parent for inside in sorted(folder.glob(f"*/{SUMMARY}")) for s in _strategies(inside)}
    return [(run.scenario, s, read_picture(folders[s.name], s) if s.name in folders else None) for s in run.strategies]


def _strategies(file: Path) -> tuple[StrategySummary, ...]:
    return read_summary(file).strategies


def read_summary(path: Path) -> RunSummary:
    """A summary.json, or the output of `--json`. Raises RunError."""
    try:
        return TypeAdapter(RunSummary).validate_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RunError(f"{path}: not written by this version of sim: {where}: {first['msg'].lower()}") from None


def read_picture(folder: Path, summary: StrategySummary) -> Picture | None:
    """The picture of a strategy from its tables; None if it did not fit or the tables are gone. Raises RunError."""
    if summary.step_time_s is None or summary.steady_step_start_s is None:
        return None
    if not (folder / KERNELS).is_file() or not (folder / MEMORY).is_file():
        return None
    import pyarrow.parquet as parquet

    try:
        kernels, allocations = parquet.read_table(folder / KERNELS), parquet.read_table(folder / MEMORY)
        begin_ns = summary.steady_step_start_s * 1e9
        return _picture(summary, kernels, allocations, begin_ns, begin_ns + summary.step_time_s * 1e9)
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder}: its tables cannot be read: {error}") from None


def _picture(
    summary: StrategySummary, kernels: pa.Table, allocations: pa.Table, begin_ns: float, end_ns: float
) -> Picture:
    times_ns, change, owner, names = _changes(allocations)
    curves = {name: np.cumsum(np.where(owner == number, change, 0)) for number, name in names}
    active = np.cumsum(change)
    first, last = np.searchsorted(times_ns, (begin_ns, end_ns + 1.0))
    times_ms = (times_ns[first:last] - begin_ns) * 1e-6
    kept = thinned(times_ms, active[first:last])
    events = np.concatenate(([max(first - 1, 0)], first + kept))
    at = int(np.argmax(active[first:last])) if last > first else 0
    peak = summary.peak
    start, duration = kernels["start_ns"].to_numpy(), kernels["duration_ns"].to_numpy()
    collective = np.array([name.startswith("nccl") for name in kernels["name"].to_pylist()], bool)
    work = Work(
        stream=_numbered(kernels, "stream", {name: number for number, name in enumerate(STREAM_NAMES)}),
        phase=_numbered(kernels, "phase", {phase.name.lower(): int(phase) for phase in Phase}),
        is_collective=collective,
        is_copy=np.array([name.startswith("Memcpy") for name in kernels["name"].to_pylist()], bool),
        start_ns=start,
        end_ns=start + duration,
    )
    return Picture(
        name=summary.name,
        fits=True,
        step_ms=(end_ns - begin_ns) * 1e-6,
        times_ms=np.concatenate(([0.0], times_ms[kept])),
        owners={name: curve[events] for name, curve in curves.items() if curve.any()},
        reserved_bytes=None,
        capacity_bytes=summary.usable_device_bytes - summary.context_bytes - summary.communicator_bytes,
        peak_ms=float(times_ms[at]) if last > first else 0.0,
        peak_bytes=summary.peak_active_bytes,
        peak_place=f"{place(peak.phase, peak.layer)} ({short_op(peak.op, peak.phase)})",
        host=None,
        lanes=stream_lanes(work, begin_ns, end_ns),
    )


def _changes(allocations: pa.Table) -> tuple[np.ndarray, Ints, Ints, Iterator[tuple[int, str]]]:
    """Allocations and frees in the order of events: device time, change in bytes, number of the owner; owners' names."""
    import pyarrow.compute as compute

    owners = allocations["owner"].combine_chunks()
    freed = allocations.filter(compute.is_valid(allocations["free_event"]))
    owner = np.concatenate((owners.indices.to_numpy(), freed["owner"].combine_chunks().indices.to_numpy()))
    change = np.concatenate((allocations["block_bytes"].to_numpy(), -freed["block_bytes"].to_numpy()))
    times_ns = np.concatenate((allocations["alloc_device_ns"].to_numpy(), freed["free_device_ns"].to_numpy()))
    order = np.argsort(np.concatenate((allocations["alloc_event"].to_numpy(), freed["free_event"].to_numpy())))
    return times_ns[order], change[order], owner[order], enumerate(owners.dictionary.to_pylist())


def _numbered(table: pa.Table, column: str, numbers: dict[str, int]) -> Ints:
    """A column of names as numbers. Raises KeyError for a name that has none."""
    coded = table[column].combine_chunks()
    known = np.array([numbers[name] for name in coded.dictionary.to_pylist()], np.int64)
    result: Ints = known[coded.indices.to_numpy()]
    return result
