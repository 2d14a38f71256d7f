"""The files of a run: one folder per strategy, every file complete or absent."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from sim.api import Outcome, has_allocator
from sim.report.errors import RunError, cannot_write
from sim.report.figure import save, timeline_figure, title_of
from sim.report.picture import Picture, save_picture
from sim.report.snapshot import snapshot_bytes
from sim.report.summary import RunSummary, to_json
from sim.timeline.export.tables import kernel_table, memory_table
from sim.timeline.export.trace import Rank, trace_bytes
from sim.timeline.lanes import Lanes

SUMMARY, KERNELS, MEMORY, TRACE, SNAPSHOT, FIGURE, PICTURE = (
    "summary.json", "kernels.parquet", "memory.parquet", "trace.json.gz", "snapshot.pickle", "timeline.png",
    "picture.npz",
)  # fmt: skip
SCENARIO = "scenario.yaml"
"""Beside a run's summary: the scenario, whole."""
RANKS = "ranks"
"""Folder of every simulated rank's trace and snapshot, where they are asked for."""
FILES = (FIGURE, TRACE, SNAPSHOT, KERNELS, MEMORY, PICTURE, SUMMARY)
LONGEST_FOLDER = 80


def run_name(title: str) -> str:
    """The name of a run's folder or page. A title that had to be changed has a hash of it at its end, so that "x y" and
    "x_y" do not share a folder: runs know nothing of each other, unlike the strategies of one."""
    safe = _safe(title)
    return safe if safe == title or len(title) > LONGEST_FOLDER else f"{safe}-{_hash(title)[:6]}"


def folder_names(names: Iterable[str]) -> list[str]:
    """A folder name per name: letters, digits and `-_.+=@,` of it, never hidden, no two alike on any file system."""
    folders: list[str] = []
    taken: set[str] = set()
    for name in names:
        safe = _safe(name)
        folder, number = safe, 1
        while folder.casefold() in taken:
            number += 1
            folder = f"{safe}-{number}"
        taken.add(folder.casefold())
        folders.append(folder)
    return folders


def _safe(name: str) -> str:
    """Long names keep their beginning, and stay distinct by a hash of the whole."""
    safe = re.sub(r"[^\w.+=@,-]+", "_", unicodedata.normalize("NFC", name)).strip(".") or "_"
    return safe if len(name) <= LONGEST_FOLDER else f"{safe[: LONGEST_FOLDER - 9]}-{_hash(name)[:8]}"


def _hash(name: str) -> str:
    return sha256(name.encode()).hexdigest()


unfinished: set[Path] = set()
"""Temporary files that are being written."""


def remove_unfinished() -> None:
    """For a process that ends in the middle of writing."""
    for path in tuple(unfinished):
        path.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """`write` fills a temporary file beside `path`, which then takes its name. Raises OSError, about `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.add(temporary)
    try:
        with temporary.open("wb") as file:
            write(file)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
        unfinished.discard(temporary)


def strategy_folders(out: Path, title: str, strategies: Sequence[str]) -> list[Path]:
    """Make out/<title of the scenario>/<strategy> for every strategy, before anything is played. Raises RunError."""
    root = out / run_name(title)
    folders = [root / name for name in folder_names(strategies)]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(error, folder) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RunError(f"{folder}: cannot be written: permission denied")
    return folders


def write_files(
    folder: Path,
    outcome: Outcome,
    ranks: Sequence[Lanes],
    picture: Picture,
    summary: RunSummary,
    every_rank: bool = False,
) -> None:
    """Everything that one strategy leaves. Raises OSError. With a pipeline, the tables are those of the worst rank.

    `ranks` are the outcome's `shown_lanes`: out of memory, tables and trace hold what was allocated until then, timed
    as if there had been enough.
    """
    import pyarrow.parquet as parquet

    memory = outcome.memory
    lanes = ranks[outcome.ranks.index(outcome.worst)]
    rank = rank_of(outcome, outcome.ranks.index(outcome.worst))
    title = title_of(summary.title, picture, summary.strategies[0].headroom_bytes)
    kernels, allocations = kernel_table(lanes), memory_table(memory, lanes)
    trace, text = trace_bytes(memory, lanes, rank), to_json(summary) + "\n"
    snapshot = snapshot_bytes(outcome.setup, memory, lanes) if has_allocator(outcome.setup) else None
    write_atomically(folder / KERNELS, lambda file: parquet.write_table(kernels, file))
    write_atomically(folder / MEMORY, lambda file: parquet.write_table(allocations, file))
    write_atomically(folder / TRACE, lambda file: file.write(trace))
    if snapshot is None:
        (folder / SNAPSHOT).unlink(missing_ok=True)  # of an earlier run
    else:
        write_atomically(folder / SNAPSHOT, lambda file: file.write(snapshot))
    write_atomically(folder / FIGURE, lambda file: save(timeline_figure(picture, title), file))
    write_atomically(folder / PICTURE, lambda file: save_picture(file, picture))
    if every_rank:
        write_ranks(folder / RANKS, outcome, ranks)
    write_atomically(folder / SUMMARY, lambda file: file.write(text.encode()))


def write_ranks(folder: Path, outcome: Outcome, ranks: Sequence[Lanes]) -> None:
    """Trace and snapshot of every simulated rank, by its number among all: rank0.json.gz, rank0.pickle. Raises OSError."""
    folder.mkdir(exist_ok=True)
    for number, (played, lanes) in enumerate(zip(outcome.ranks, ranks)):
        rank = rank_of(outcome, number)
        trace = trace_bytes(played.memory, lanes, rank)
        write_atomically(folder / f"rank{rank.rank}.json.gz", partial(_write, trace))
        snapshot = snapshot_bytes(outcome.setup, played.memory, lanes)
        write_atomically(folder / f"rank{rank.rank}.pickle", partial(_write, snapshot))


def _write(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def rank_of(outcome: Outcome, number: int) -> Rank:
    """The simulated rank as one of all: the first of those that it stands for."""
    cluster = outcome.setup.cluster
    world_rank = outcome.setup.mesh.rank({"pp": number})
    return Rank(world_rank, cluster.gpus, cluster.gpu.title, cluster.gpu.memory_bytes)


def write_run(folder: Path, summary: RunSummary, scenario: str) -> None:
    """summary.json and scenario.yaml of a whole run, beside its strategies' folders. Raises RunError."""
    try:
        write_atomically(folder / SUMMARY, lambda file: file.write((to_json(summary) + "\n").encode()))
        write_atomically(folder / SCENARIO, lambda file: file.write(scenario.encode()))
    except OSError as error:
        raise cannot_write(error, folder) from None
