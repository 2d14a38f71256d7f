"""What did the user ask? Scenario files (`schema`, `load`) become complete, checked `Setup` objects (`resolve`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sim.scenario.editors import json_schema
from sim.scenario.load import load_document, load_text_document
from sim.scenario.problems import Problem, ScenarioError
from sim.scenario.reference import field_reference, section_names
from sim.scenario.resolve import resolve
from sim.scenario.sections import is_field
from sim.scenario.setup import Scenario, Setup


def load_scenario(path: str | Path, overrides: Iterable[str] = ()) -> Scenario:
    """A scenario file with `path=value` overrides, e.g. "batch.seq_len=4096". Raises ScenarioError, all at once."""
    file, changes = Path(path), tuple(overrides)
    return resolve(load_document(file, changes), file.stem, file, changes)


def load_text(text: str, name: str = "scenario", overrides: Iterable[str] = ()) -> Scenario:
    """A scenario from text; `name` stands for the file in problems. Raises ScenarioError, all at once."""
    changes = tuple(overrides)
    return resolve(load_text_document(text, name, changes), name, None, changes)


__all__ = [
    "Problem",
    "Scenario",
    "ScenarioError",
    "Setup",
    "field_reference",
    "is_field",
    "json_schema",
    "load_scenario",
    "load_text",
    "section_names",
]
