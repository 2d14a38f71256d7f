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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from sim.api import simulate_setup
from sim.cost.figures import CostError
from sim.engine.allocator import AllocatorSettings, SettingsError
from sim.engine.deadlock import DeadlockError
from sim.plan.micro_batch import largest_micro_batch
from sim.report.summary import StrategySummary, evidence, summarize
from sim.scenario.setup import Setup

Done = Callable[[str], None]


class RunError(Exception):
    """A run that cannot be carried out; the message is for the user."""


def check_setup(setup: Setup) -> None:
    """Look up what a run needs beside the scenario. Raises RunError: unknown cost profile, bad settings."""
    try:
        evidence(setup)
        AllocatorSettings.parse(setup.allocator, setup.torch)
    except CostError as error:
        raise RunError(f"strategy {setup.name}: {error}") from None
    except SettingsError as error:
        raise RunError(f"strategy {setup.name}: allocator: {setup.allocator}\n{error}") from None


def play_strategy(setup: Setup) -> StrategySummary:
    """Play one strategy. Raises RunError."""
    try:
        outcome = simulate_setup(setup)
        largest = largest_micro_batch(outcome)
    except DeadlockError as error:
        raise RunError(f"strategy {setup.name}: {error}") from None
    return summarize(outcome, largest.size if largest else None)


def play_all(setups: Sequence[Setup], jobs: int | None = None, done: Done = lambda name: None) -> list[StrategySummary]:
    """Play every strategy; `jobs` processes at most (None: as many as there are processors). `done` hears of each."""
    for setup in setups:
        check_setup(setup)
    workers = min(len(setups), jobs or processors())
    if workers < 2 or not can_fork():
        played = []
        for setup in setups:
            played.append(play_strategy(setup))
            done(setup.name)
        return played
    with workers_of(workers) as pool:
        futures = {pool.submit(play_strategy, setup): setup.name for setup in setups}
        return list(_collect(futures, done))


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Forking is cheap where it exists, and safe while there is one thread."""
    return "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1


@contextmanager
def workers_of(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of forked processes that end with this one, also when it is interrupted."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)
    )
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _collect(futures: dict[Future[StrategySummary], str], done: Done) -> Iterator[StrategySummary]:
    try:
        for future in as_completed(futures):
            future.result()
            done(futures[future])
    except BrokenProcessPool:
        raise RunError("a worker process was ended from outside; was the machine short of memory?") from None
    yield from (future.result() for future in futures)
