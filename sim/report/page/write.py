"""Plays a run again and writes its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sim.api import simulate_setup
from sim.report.errors import RunError, cannot_write
from sim.report.files import run_name, write_atomically
from sim.report.page.build import build_page
from sim.report.page.data import Shown
from sim.report.progress import Progress
from sim.report.rerun import every_setup
from sim.report.summary import summarize, summarize_run

MOST_STRATEGIES = 10
"""A page of more would pass the 8 MB that browsers open at once."""


def write_page(run: Path, out: Path, only: Sequence[str] = ()) -> Path:
    """The page of a run's folder, a strategy's folder or a scenario file, as out/<title>.html. Raises RunError."""
    scenario, setups = every_setup(run, only)
    if len(setups) > MOST_STRATEGIES:
        raise RunError(f"{run}: {len(setups)} strategies; a page shows {MOST_STRATEGIES} at most: choose with --only")
    shown = []
    with Progress(2 * len(setups), "playing strategies") as progress:
        for setup in setups:
            outcome = simulate_setup(setup)
            shown.append(progress.past(Shown.of(outcome, summarize(outcome, None))))
        summary = summarize_run(scenario, tuple(one.summary for one in shown))
        text = build_page(scenario, summary, shown, lambda: progress.past(None))
    path = out / f"{run_name(scenario.title)}.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise cannot_write(error, path) from None
    return path
