"""Cases as data: arithmetic on figures, classes and tolerances, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.api import Outcome, simulate_setup
from sim.checks.figures import FigureError, evaluate, names
from sim.scenario import load_text
from tests.unit.scenarios import TINY, sim, write

CASE = """
- id: T-1
  source: nobody
  base: &base
    model: {preset: llama-tiny}
    cluster: {gpu: h100, gpus_per_node: 1}
    batch: {micro_batch: 1, seq_len: 128}
  runs:
    none: {}
    full: {checkpoint: {every: 1}}
  checks:
    - {figure: none.parameters - full.parameters + 100, expected: 100, class: exact}
    - {figure: full.peak_active_gib <= none.peak_active_gib, class: ordering}
"""


@pytest.fixture(scope="module")
def runs() -> dict[str, Outcome]:
    return {setup.name: simulate_setup(setup) for setup in load_text(TINY).strategies}


def test_figures_can_be_reckoned_with(runs: dict[str, Outcome]) -> None:
    assert evaluate("2 * (1 + 3) - -1 / 4", runs) == 8.25
    assert evaluate("none.parameters / full.parameters", runs) == 1
    assert evaluate("0 < full.step_time_s <= 1", runs) == 1
    one = {"only": runs["none"]}
    assert evaluate("parameters", one) == evaluate("only.parameters", one)


def test_every_named_figure_is_there(runs: dict[str, Outcome]) -> None:
    assert all(evaluate(f"none.{name}", runs) >= 0 for name in names())


def test_states_are_four_bytes_of_each_kind_a_parameter(runs: dict[str, Outcome]) -> None:
    states = evaluate("none.states_after_step_gib * 1073741824 / (none.parameters * 16 / 2)", runs)
    assert states == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "none.nothing",
        "other.parameters",
        "parameters",
        "__import__('os')",
        "none.parameters ** 2",
        "1 +",
        "'text'",
        "True",
    ],
)
def test_anything_else_is_no_figure(text: str, runs: dict[str, Outcome]) -> None:
    with pytest.raises(FigureError):
        evaluate(text, runs)


def test_cases_that_are_met_exit_with_0(tmp_path: Path) -> None:
    result = sim("validate", write(tmp_path, CASE, "cases.yaml"), "--jobs", "1")
    assert result.exit_code == 0, result.stderr
    assert "2 met" in result.stdout


def test_a_case_that_misses_its_class_exits_with_1(tmp_path: Path) -> None:
    text = CASE.replace("expected: 100", "expected: 100.5")
    result = sim("validate", write(tmp_path, text, "cases.yaml"), "--jobs", "1", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)
    assert (first["verdict"], second["verdict"]) == ("missed", "met")
    assert first["error"] == pytest.approx(100 / 100.5 - 1)
    assert sim("validate", write(tmp_path, text.replace("exact", "tight"), "tight.yaml"), "--jobs", "1").exit_code == 0


def test_a_known_miss_is_shown_and_does_not_fail(tmp_path: Path) -> None:
    text = CASE.replace("expected: 100, class: exact", "expected: 200, class: band, misses: the moon is full")
    result = sim("validate", write(tmp_path, text, "cases.yaml"), "--jobs", "1")
    assert result.exit_code == 0
    assert "known miss" in result.stdout and "the moon is full" in result.stdout


def test_a_scenario_that_is_wrong_fails_its_case_only(tmp_path: Path) -> None:
    text = CASE + CASE.replace("T-1", "T-2").replace("llama-tiny", "llama-tini").replace("&base", "")
    result = sim("validate", write(tmp_path, text, "cases.yaml"), "--jobs", "1", "--json")
    assert result.exit_code == 1
    verdicts = [check["verdict"] for check in json.loads(result.stdout)]
    assert verdicts == ["met", "met", "failed", "failed"]
    assert "did you mean llama-tiny" in json.loads(result.stdout)[2]["reason"]


def test_a_case_waits_for_what_scenarios_cannot_say_yet(tmp_path: Path) -> None:
    text = CASE.replace("source: nobody", "source: nobody\n  needs: [parallel.fsdp, parallel.teleport]")
    result = sim("validate", write(tmp_path, text, "cases.yaml"), "--json")
    assert result.exit_code == 0
    assert {check["verdict"] for check in json.loads(result.stdout)} == {"waits"}
    assert json.loads(result.stdout)[0]["reason"] == "scenarios have no parallel.teleport"


def test_a_run_may_name_a_scenario_file(tmp_path: Path) -> None:
    write(tmp_path, TINY, "tiny.yaml")
    case = """
- id: F
  source: nobody
  runs: {it: {scenario: tiny.yaml, strategy: full}}
  checks: [{figure: recompute_of_step > 0, class: ordering}]
"""
    assert sim("validate", write(tmp_path, case, "cases.yaml")).exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "not YAML"),
        ("- {id: x}", "source: Field required"),
        (CASE.replace("class: exact", "class: roughly"), "checks.0.class"),
    ],
)
def test_a_file_that_is_no_cases_is_wrong_input(text: str, words: str, tmp_path: Path) -> None:
    result = sim("validate", write(tmp_path, text, "cases.yaml"))
    assert result.exit_code == 2
    assert words in result.stderr


def test_one_case_can_be_played_alone(tmp_path: Path) -> None:
    file = write(tmp_path, CASE, "cases.yaml")
    assert sim("validate", file, "--only", "T-1").exit_code == 0
    unknown = sim("validate", file, "--only", "T-9")
    assert unknown.exit_code == 2 and "one of T-1" in unknown.stderr
