"""Joins the page: its parts, plotly's script, and the data, in one file that needs no network."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from importlib.resources import files

from sim.api import Outcome, simulate_setup
from sim.plan.changes import changed
from sim.program.program import Owner
from sim.report.console import Unit, explanation, headline, main_columns
from sim.report.figure import STACK, WORK_COLOURS
from sim.report.page.data import MIB, Json, Shown, strategy_data
from sim.report.picture import Picture
from sim.report.summary import RunSummary
from sim.report.words import UNICODE
from sim.scenario import Scenario, ScenarioError
from sim.units import format_duration

ORANGE = "#F28E2B"
COLOURS = STACK | {"recomputed activations": ORANGE, "logits and loss": "#B39DDB"}
"""Those of the figures, but recomputed activations orange, and so the loss not."""
KEPT = (Owner.ACTIVATION, Owner.CHECKPOINT, Owner.RECOMPUTED)


def build_page(scenario: Scenario, run: RunSummary, shown: Sequence[Shown], past: Callable[[], None]) -> str:
    """The page of a run, HTML. `past` is called after each strategy whose curve without recompute was played."""
    strategies = []
    for one in shown:
        strategies.append(strategy_data(one, _without_recompute(scenario, one), len(shown)))
        past()
    columns = main_columns(run.strategies, UNICODE)
    unit = Unit.of(run.strategies)
    words = [0, *(1 + at for at, column in enumerate(columns) if column.justify == "left")]
    data: Json = {
        "headline": str(headline(run)).removeprefix(f"{run.title}: "),
        "columns": ["strategy", *(column.heading for column in columns)],
        "words": words,
        "fitsColumn": len(columns),
        "table": [[s.name, *(str(column.cell(s)) for column in columns)] for s in run.strategies],
        "why": [str(explanation(s, unit)) for s in run.strategies],
        "colours": COLOURS,
        "work": WORK_COLOURS | {"recompute": ORANGE, "loss": "#B39DDB"},
        "strategies": strategies,
        "plane": [_point(one.outcome) for one in shown],
        "labels": _labels(run),
        "scenario": scenario.text,
        "explorers": json.loads(_part("explorers.json"))["explorers"],
    }
    return _joined(run.title, data)


def _without_recompute(scenario: Scenario, shown: Shown) -> Picture | None:
    """The same with every activation kept; None where nothing is recomputed, or no scenario says that."""
    if shown.outcome.setup.checkpoint is None:
        return None
    try:
        setup = changed(scenario, shown.outcome.name, {"checkpoint": None})
    except ScenarioError:
        return None
    return Shown.of(simulate_setup(setup), shown.summary).picture


def _point(outcome: Outcome) -> Json:
    """Where a strategy lies in the plane of kept bytes against extra compute."""
    memory = outcome.worst.shown
    first, last = memory.steps()[-1]
    curves = memory.owner_curves()
    kept = sum(
        (curves[owner][first:last] for owner in KEPT if owner in curves), start=0 * memory.allocated_bytes[first:last]
    )
    time = outcome.time
    return {
        "name": outcome.name,
        "kept": round(int(kept.max(initial=0)) / MIB, 1),
        "extra": time.recompute_of_forward if time else 0.0,
        "step": format_duration(time.step_ns) if time else "unknown",
        "fits": outcome.fits,
    }


def _labels(run: RunSummary) -> list[list[str]]:
    """What figures rest on; once where strategies agree."""
    found: dict[tuple[str, str, str], None] = {}
    for s in run.strategies:
        for figure, evidence in s.labels.items():
            found[(figure.replace("_", " "), evidence.label, evidence.source)] = None
    return [list(row) for row in found]


def _joined(title: str, data: Json) -> str:
    from plotly.offline import get_plotlyjs

    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts: dict[str, str] = {
        "title": _escaped(title),
        "css": _part("page.css"),
        "plotly": packed(get_plotlyjs()),
        "data": packed(text),
        "js": _part("page.js"),
    }
    page = _part("page.html")
    for name, part in parts.items():
        page = page.replace("{{" + name + "}}", part)
    return page


def packed(text: str) -> str:
    """gzip in base64: a third of the script, a quarter of the data."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _part(name: str) -> str:
    return files("sim.report.page").joinpath(name).read_text(encoding="utf-8")
