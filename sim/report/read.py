"""Reads back what a run has left: summary.json, and the picture beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

from pydantic import TypeAdapter, ValidationError

from sim.report.errors import RunError
from sim.report.files import MEMORY, PICTURE, SUMMARY
from sim.report.notes import between
from sim.report.picture import Picture, load_picture
from sim.report.summary import RunSummary, StrategySummary, fingerprint
from sim.scenario.setup import Scenario


def read_run(path: Path) -> list[tuple[str, StrategySummary, Picture | None, Path]]:
    """Title, figures, picture and folder of every strategy in a run's folder, a strategy's folder, or a summary file.

    Raises RunError.
    """
    file = path / SUMMARY if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise RunError(f"{path}: no {SUMMARY} in it: the folder of a run or of a strategy is expected")
    run = read_summary(file)
    folder = file.parent
    if (folder / MEMORY).is_file():
        return [(run.title, s, read_picture(folder), folder.parent) for s in run.strategies]
    folders = {s.name: inside.parent for inside in sorted(folder.glob(f"*/{SUMMARY}")) for s in _strategies(inside)}
    pictures = {name: read_picture(inside) for name, inside in folders.items()}
    source = folder if path.is_dir() else file.with_suffix("")
    return [(run.title, s, pictures.get(s.name), source) for s in run.strategies]


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


def read_picture(folder: Path) -> Picture | None:
    """The picture of a strategy; None if it is not there. Raises RunError."""
    file = folder / PICTURE
    if not file.is_file():
        return None
    try:
        return load_picture(file)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise RunError(f"{file}: cannot be read: {error}") from None


def with_earlier(folder: Path, run: RunSummary, scenario: Scenario) -> RunSummary:
    """The run with those of the scenario's other strategies that the folder's summary holds from the same set-up."""
    try:
        earlier = read_summary(folder / SUMMARY).strategies
    except RunError:  # none, or of another version
        return run
    setups = {setup.name: setup for setup in scenario.strategies}
    found = {s.name: s for s in earlier if s.name in setups and s.fingerprint == fingerprint(setups[s.name])}
    found |= {s.name: s for s in run.strategies}
    strategies = tuple(found[name] for name in setups if name in found)
    return replace(run, strategies=strategies, notes=between(scenario, strategies))
