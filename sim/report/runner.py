"""Plays the strategies of a scenario, several at a time where that pays, and hands back their figures.

A worker process plays a strategy, searches its largest micro-batch and writes its files; only figures travel back, in
the scenario's order, so the answer does not depend on the number of processes. Processes are forked: starting one
costs milliseconds then, where a fresh interpreter would cost as much as most strategies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sim.api import cost_model, shown_lanes, simulate_setup
from sim.cost.figures import CostError
from sim.cost.own import ProfileError
from sim.engine.deadlock import DeadlockError
from sim.plan.micro_batch import largest_micro_batch
from sim.report.errors import RunError, cannot_write
from sim.report.files import remove_unfinished, write_files
from sim.report.picture import Picture, picture_of
from sim.report.progress import Progress
from sim.report.summary import StrategySummary, summarize, summarize_run
from sim.scenario.setup import Scenario, Setup

PATIENCE_S = 2.0
"""How long a worker may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One strategy to play. `folder`: for its files; `picture`: hand it back; `search`: for the largest micro-batch;
    `every_rank`: files of every simulated rank, not of the worst alone."""

    scenario: Scenario
    setup: Setup
    folder: Path | None = None
    picture: bool = False
    search: bool = True
    every_rank: bool = False

    @property
    def name(self) -> str:
        return self.setup.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What comes back of a task."""

    summary: StrategySummary
    picture: Picture | None = None


def check_setup(setup: Setup) -> None:
    """Look up what a run needs beside the scenario. Raises RunError: unknown cost profile."""
    try:
        cost_model(setup)
    except ProfileError as error:
        raise RunError(str(error)) from None
    except CostError as error:
        raise RunError(f"strategy {setup.name}: {error}") from None


def play_task(task: Task) -> Answer:
    """Play one strategy and write its files. Raises RunError."""
    try:
        outcome = simulate_setup(task.setup)
        largest = largest_micro_batch(outcome) if task.search else None
        summary = summarize(outcome, largest.size if largest else None)
        if task.folder is None and not task.picture:
            return Answer(summary=summary)
        lanes = shown_lanes(outcome)
    except DeadlockError as error:
        raise RunError(f"strategy {task.name}: {error}") from None
    picture = picture_of(outcome, lanes)
    if task.folder is not None:
        try:
            run = summarize_run(task.scenario, (summary,))
            write_files(task.folder, outcome, lanes, picture, run, task.every_rank)
        except OSError as error:
            raise cannot_write(error, task.folder) from None
    return Answer(summary=summary, picture=picture if task.picture else None)


def play_all(tasks: Sequence[Task], jobs: int | None = None) -> list[Answer]:
    """Play every task, `jobs` at a time (None: as many as there are processors), under a progress bar.

    All are checked before the first is played. Raises RunError.
    """
    for task in tasks:
        check_setup(task.setup)
    workers = min(len(tasks), jobs or processors())
    if workers < 2 or not can_fork():
        with Progress(len(tasks)) as progress:
            return [progress.past(play_task(task)) for task in tasks]
    if any(task.folder for task in tasks):
        import_writers()
    with workers_of(workers) as pool:
        futures = [pool.submit(play_task, task) for task in tasks]  # forks all workers; the bar's thread comes after
        with Progress(len(tasks)) as progress:
            return _collect(futures, progress)


def import_writers() -> None:
    """Import once, before forking, what every worker would import."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import pyarrow.parquet  # noqa: F401


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Forking is cheap where it exists, and safe while there is one thread."""
    return "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1


def end_cleanly() -> None:
    """A worker that is terminated takes its half-written files with it; an interrupt is for the process above it."""

    def end(number: int, _: object) -> None:
        remove_unfinished()
        os._exit(128 + number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)


@contextmanager
def workers_of(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of forked processes that end with this one, also when it is interrupted."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=end_cleanly)
    try:
        yield pool
    except BaseException:
        workers = multiprocessing.active_children()
        for process in workers:
            process.terminate()
        for process in workers:
            process.join(PATIENCE_S)
            process.kill()  # where terminating was not enough
        pool.shutdown(cancel_futures=True)  # waits for its thread, whose end the interpreter's would meet halfway
        raise
    pool.shutdown()


def _collect(futures: Sequence[Future[Answer]], progress: Progress) -> list[Answer]:
    try:
        for future in as_completed(futures):
            progress.past(future.result())
    except BrokenProcessPool:
        raise RunError("a worker process was ended from outside; was the machine short of memory?") from None
    return [future.result() for future in futures]
