"""Published cases: what a source says of a run that a scenario can say, with how near the simulation must come.

A file of cases is a YAML list; docs/validation.md explains the fields. Classes:

    exact     arithmetic and counts: within 0.1 %
    tight     within 3 %
    band      within 15 %: needs calibration
    ordering  an inequality that must hold
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sim.api import Outcome, load, simulate_setup
from sim.checks.expressible import expressible
from sim.checks.figures import FigureError, evaluate
from sim.scenario import ScenarioError, load_text
from sim.scenario.setup import Setup

Kind = Literal["exact", "tight", "band", "ordering"]
Verdict = Literal["met", "missed", "known miss", "waits", "failed"]

TOLERANCES: dict[Kind, float] = {"exact": 0.001, "tight": 0.03, "band": 0.15, "ordering": 0.0}


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(Entry):
    """One figure: an expression (figures.py), what the source says, and how near it must come."""

    figure: str
    expected: float | None = None
    kind: Kind = Field(alias="class")
    tolerance: float | None = None
    """Of the class where it is not given."""
    misses: str = ""
    """Why the figure is known to miss; it is shown and does not fail the run."""


class Case(Entry):
    """`runs` by name: sections of a scenario over `base`, or {scenario: file beside this one, strategy: name}."""

    id: str
    source: str
    needs: list[str] = []
    """Fields of a scenario, as dotted paths, that the schema must have; without them the case waits."""
    base: dict[str, Any] = {}
    runs: dict[str, dict[str, Any]]
    checks: list[Check]


class CaseError(ValueError):
    """A file of cases that cannot be read; the message names file and place."""


@dataclass(frozen=True, slots=True)
class PlacedCase:
    """A case and the folder that its scenario files are relative to."""

    case: Case
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A check, played. `predicted` is None where nothing could be; an ordering's is 1 if it holds, else 0."""

    case: str
    source: str
    figure: str
    predicted: float | None
    published: float | None
    error: float | None
    kind: Kind
    verdict: Verdict
    reason: str


def packaged_cases() -> list[PlacedCase]:
    """The cases that come with sim, by file name."""
    folder = Path(str(files("sim.checks"))) / "cases"
    return [case for file in sorted(folder.glob("*.yaml")) for case in read_cases(file)]


def read_cases(path: Path) -> list[PlacedCase]:
    """The cases of a file. Raises CaseError, OSError."""
    try:
        data = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        cases = TypeAdapter(list[Case]).validate_python(data)
    except (YAMLError, UnicodeDecodeError) as error:
        raise CaseError(f"{path}: not YAML: {' '.join(str(error).split())[:120]}") from None
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors(include_url=False)]
        raise CaseError(f"{path}: " + "; ".join(wrong)) from None
    return [PlacedCase(case, path.parent) for case in cases]


def play_case(placed: PlacedCase) -> list[CheckResult]:
    """Play the runs of a case, in order, and judge its checks. Never raises: what goes wrong is the verdict."""
    case = placed.case
    if lacking := [path for path in case.needs if not expressible(path)]:
        return [_unplayed(case, check, f"scenarios have no {', '.join(lacking)}", "waits") for check in case.checks]
    try:
        runs = {name: simulate_setup(_setup(placed, name)) for name in case.runs}
    except ScenarioError as error:
        return [_unplayed(case, check, str(error).replace("\n", " ")) for check in case.checks]
    except Exception as error:
        return [_unplayed(case, check, f"{type(error).__name__}: {error}") for check in case.checks]
    return [judge(case, check, runs) for check in case.checks]


def judge(case: Case, check: Check, runs: Mapping[str, Outcome]) -> CheckResult:
    """The verdict on one check."""
    try:
        predicted = evaluate(check.figure, runs)
    except (FigureError, ZeroDivisionError) as fault:
        return _unplayed(case, check, str(fault))
    tolerance = TOLERANCES[check.kind] if check.tolerance is None else check.tolerance
    error = None
    if check.kind == "ordering":
        met = predicted == 1.0
    elif not check.expected:
        return _unplayed(case, check, "expected: a figure other than 0 is needed")
    else:
        error = predicted / check.expected - 1
        met = abs(error) <= tolerance
    return CheckResult(
        case=case.id,
        source=case.source,
        figure=check.figure,
        predicted=predicted,
        published=check.expected,
        error=error,
        kind=check.kind,
        verdict="met" if met else "known miss" if check.misses else "missed",
        reason="" if met else check.misses,
    )


def good(results: Sequence[CheckResult]) -> bool:
    """No check misses its class, but for known misses and what waits."""
    return all(result.verdict in ("met", "known miss", "waits") for result in results)


def _setup(placed: PlacedCase, name: str) -> Setup:
    case, run = placed.case, placed.case.runs[name]
    if "scenario" in run:
        scenario = load(placed.folder / str(run["scenario"]))
        wanted = run.get("strategy", scenario.strategies[0].name)
        return next(setup for setup in scenario.strategies if setup.name == wanted)
    return load_text(json.dumps(_merged(case.base, run)), f"{case.id} {name}").strategies[0]


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _unplayed(case: Case, check: Check, reason: str, verdict: Verdict = "failed") -> CheckResult:
    return CheckResult(
        case=case.id,
        source=case.source,
        figure=check.figure,
        predicted=None,
        published=check.expected,
        error=None,
        kind=check.kind,
        verdict=verdict,
        reason=reason,
    )
