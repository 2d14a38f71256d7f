"""Playing again what a run has left: its folder keeps the scenario."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sim.api import load
from sim.report.errors import RunError
from sim.report.files import MEMORY, SCENARIO, SUMMARY
from sim.report.read import read_summary
from sim.report.summary import fingerprint
from sim.scenario import Scenario, Setup, load_text
from sim.scenario.problems import nearest_name


def chosen_setups(path: Path, only: Sequence[str]) -> tuple[Scenario, list[Setup]]:
    """As every_setup, `only` those named; of a run's folder one must be named where it has several."""
    scenario, setups = every_setup(path, only)
    if len(setups) > 1 and not only and path.is_dir():
        names = ", ".join(setup.name for setup in setups)
        raise RunError(f"{path}: holds {names}: say which, by its folder or --only")
    return scenario, setups


def every_setup(path: Path, only: Sequence[str] = ()) -> tuple[Scenario, list[Setup]]:
    """The scenario of a run's folder, of a strategy's folder or of a file, and its strategies (of `only`).

    Raises RunError, ScenarioError.
    """
    if not path.is_dir():
        scenario = load(path)
        return scenario, _chosen(scenario, only, path)
    alone = (path / MEMORY).is_file()
    root = path.parent if alone else path
    scenario = _scenario_of(root)
    if alone and not only:
        only = [read_summary(path / SUMMARY).strategies[0].name]
    setups = _chosen(scenario, only, path)
    _warn_of_other_versions(root, setups)
    return scenario, setups


def _scenario_of(root: Path) -> Scenario:
    file = root / SCENARIO
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file}: {(error.strerror or str(error)).lower()}: the folder of a run is expected") from None
    return load_text(text, root.name)


def _chosen(scenario: Scenario, only: Sequence[str], path: Path) -> list[Setup]:
    known = [setup.name for setup in scenario.strategies]
    for name in only:
        if name not in known:
            near = nearest_name(name, known)
            hint = f" (did you mean {near}?)" if near else ""
            raise RunError(f"{path}: no strategy {name}: one of {', '.join(known)}{hint}")
    return [setup for setup in scenario.strategies if not only or setup.name in only]


def _warn_of_other_versions(root: Path, setups: Sequence[Setup]) -> None:
    try:
        written = {one.name: one.fingerprint for one in read_summary(root / SUMMARY).strategies}
    except RunError:
        written = {}
    for setup in setups:
        if written.get(setup.name, fingerprint(setup)) != fingerprint(setup):
            print(f"warning: {setup.name} was run by another version of sim; its figures may differ", file=sys.stderr)
