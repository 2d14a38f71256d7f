"""`sim explain`: what it lists adds up, what it recommends has been played, wrong input is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.api import Outcome, load, simulate_setup
from sim.plan.changes import Change, changed, play_changes
from sim.report.explain import Played
from sim.report.knob import phase_peaks, verdict
from sim.report.symptoms import SYMPTOMS, guide
from sim.scenario import load_text
from sim.scenario.dump import only_strategy
from sim.timeline.holdings import held_at, ranged
from tests.unit.scenarios import CHAIN, PIPELINE, ROOT, TIGHT, TIGHTER, TINY, sim, write

SHIPPED = sorted((ROOT / "scenarios").glob("*.yaml"))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    scenario = load(write(tmp_path_factory.mktemp("explain"), TINY))
    return Played.of(simulate_setup(scenario.strategies[1]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    assert sim("run", write(folder, TINY, "tiny.yaml"), "--out", folder / "out").exit_code == 0
    return folder / "out" / "tiny"


# -- the scenario that a run leaves ----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_dumped_scenario_is_the_same(path: Path) -> None:
    scenario = load(path)
    assert load_text(scenario.text).strategies == scenario.strategies
    for setup in scenario.strategies:
        assert load_text(only_strategy(scenario.text, setup.name, {})).strategies == (setup,)


def test_overrides_and_what_it_extends_are_worked_in(tmp_path: Path) -> None:
    write(tmp_path, TINY, "base.yaml")
    scenario = load(write(tmp_path, "extends: base.yaml\nbatch: {seq_len: 256}\n"), ("batch.micro_batch=1",))
    assert load_text(scenario.text).strategies == scenario.strategies
    assert "extends" not in scenario.text


def test_a_section_that_a_change_gives_whole_replaces_the_one_there_was(tmp_path: Path) -> None:
    text = TINY.replace("full: {checkpoint: {every: 1}}", "full: {checkpoint: {save: [attention]}}")
    scenario = load(write(tmp_path, text))
    setup = changed(scenario, "full", {"checkpoint": {"every": 2}})
    assert setup.checkpoint is not None and (setup.checkpoint.every, setup.checkpoint.save) == (2, ())


# -- who is alive ----------------------------------------------------------------------------------------------------
def test_what_is_alive_sums_to_the_allocated_bytes(played: Played) -> None:
    memory = played.memory
    for event in range(0, memory.played, 97):
        assert sum(holding.bytes for holding in held_at(memory, event)) == memory.allocated_bytes[event]


def test_paths_of_alike_layers_become_a_range() -> None:
    assert ranged(["layers.0.w1", "layers.1.w1", "layers.2.w1"]) == "layers.0..2.w1"
    assert ranged(["layers.0", "layers.4"]) == "layers.0..4 (2)"
    assert ranged(["loss", "loss"]) == "loss"
    assert ranged([]) == ""


def test_the_time_of_the_peak_finds_the_peak(played: Played) -> None:
    peak = played.outcome.peak.event
    found = played.event_at(float(played.since_step_ns[peak]))
    assert played.since_step_ns[found] == played.since_step_ns[peak]
    assert found >= peak


# -- what would lower the peak ---------------------------------------------------------------------------------------
def test_every_recommended_change_has_been_played(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, TINY))
    outcome = simulate_setup(scenario.strategies[0])
    effects = play_changes(scenario, outcome)
    peaks = [effect.outcome.steady.active_bytes for effect in effects]
    assert peaks == sorted(peaks) and peaks[-1] < 0.99 * outcome.steady.active_bytes
    full = simulate_setup(scenario.strategies[1])
    by_text = {effect.change.text: effect.outcome for effect in effects}
    assert by_text["checkpoint={every: 1}"].steady == full.steady


def test_a_change_reads_as_one_would_type_it() -> None:
    change = Change(
        "", {"checkpoint": {"every": 1, "save": ["attention", "mm"]}, "optimizer.clip_norm": None, "a": True}
    )
    assert change.text == "checkpoint={every: 1, save: [attention, mm]}, optimizer.clip_norm=null, a=true"


# -- why a setting does not help -------------------------------------------------------------------------------------
def test_a_knob_that_acts_elsewhere_is_told_where(tmp_path: Path) -> None:
    """The loss holds the peak of a small model with long logits; offloaded inputs of layers are not there."""
    scenario = load(write(tmp_path, TINY), ("batch.seq_len=2048",))
    before = simulate_setup(scenario.strategies[1])
    after = simulate_setup(changed(scenario, "full", {"offload": {"what": "checkpoint_inputs", "streams": "side"}}))
    assert before.steady.active_bytes - after.steady.active_bytes < 0.05 * before.steady.active_bytes
    said = " ".join(verdict(before, after))
    assert said.startswith(("It does not lower the peak", "It lowers the peak by "))
    assert " only: that is in loss" in said or "does not lower the peak: that is in loss" in said
    assert "logits and loss hold" in said


def test_peaks_of_phases_hold_the_peak(played: Played) -> None:
    outcome = played.outcome
    assert max(phase_peaks(outcome).values()) == outcome.peak.bytes


def test_a_knob_that_is_set_already_says_so(run: Path) -> None:
    assert "nothing changes" in sim("explain", run / "full", "--knob", "checkpoint.every=1").stdout


# -- the verb --------------------------------------------------------------------------------------------------------
def test_the_peak_and_its_changes_are_shown(run: Path) -> None:
    result = sim("explain", run / "none")
    assert result.exit_code == 0
    assert "at the peak" in result.stdout and "checkpoint={every: 1}" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--at", "forward"), ("--at", "backward"), ("--at", "optimizer"), ("--time", "100us"),
        ("--module", "layers.1"), ("--tensor", "0"), ("--tensor", "layers.0.attention"), ("--symptom", "list"),
        *(("--symptom", name) for name in SYMPTOMS),
    ],
)  # fmt: skip
def test_every_question_has_an_answer(run: Path, options: tuple[str, str]) -> None:
    result = sim("explain", run / "full", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("change", "symptom", "says"),
    [
        ("checkpoint={segment: 3}", "forward-shrank-backward-oom", "A region of 3 layers runs again at once"),
        ("checkpoint=null", "same-output-other-gradients", "recomputes nothing"),
        ("checkpoint={reentrant: true}", "same-output-other-gradients", "reentrant form"),
        ("checkpoint=null", "reserved-does-not-fall", "what has to fall is the peak"),
        ("allocator=off", "reserved-does-not-fall", "No allocator was played"),
        (TIGHTER, "slower-than-predicted", "does not get through a step"),
        ("checkpoint=null", "losses-not-comparable", "A chain has no tokens"),
    ],
)
def test_a_symptom_speaks_of_the_strategy_at_hand(change: str, symptom: str, says: str, tmp_path: Path) -> None:
    scenario = write(tmp_path, load_text(CHAIN, overrides=[change]).text)
    result = sim("explain", scenario, "--only", "none", "--symptom", symptom)
    assert result.exit_code == 0 and says in " ".join(result.stdout.split())


def test_the_loss_is_named_where_it_holds_the_peak(run: Path) -> None:
    said = sim("explain", run / "full", "--symptom", "forward-shrank-backward-oom").stdout
    assert "The loss holds most" in " ".join(said.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--at", "luncheon"), "--at luncheon: one of peak, forward, backward"),
        (("--time", "9 h"), "unit h is not one of"),
        (("--time", "9 s"), "the step of full takes"),
        (("--module", "layer.1"), "nothing is made there"),
        (("--tensor", "99999999"), "--tensor 99999999: the run makes"),
        (("--symptom", "reserved-doesnt-fall"), "did you mean reserved-does-not-fall?"),
        (("--knob", "checkpoint.evry=2"), "did you mean every?"),
        (("--only", "ful"), "did you mean full?"),
    ],
)
def test_wrong_questions_are_answered(run: Path, options: tuple[str, str], says: str) -> None:
    result = sim("explain", run / "full" if options[0] != "--only" else run, *options)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_folder_without_a_run_and_one_with_several_strategies(run: Path, tmp_path: Path) -> None:
    assert "the folder of a run is expected" in sim("explain", tmp_path).stderr
    assert "holds none, full: say which" in sim("explain", run).stderr


def test_scenario_files_pipelines_chains_and_failures_can_be_asked(tmp_path: Path) -> None:
    assert sim("explain", write(tmp_path, PIPELINE), "--only", "1f1b", "--at", "forward").exit_code == 0
    result = sim("explain", write(tmp_path, CHAIN), "--only", "by-two")
    assert (result.exit_code, result.stderr) == (0, "")


def test_what_does_not_fit_is_explained_as_if_it_did(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, CHAIN), (TIGHT,))
    outcome: Outcome = simulate_setup(scenario.strategies[0])
    assert not outcome.fits
    played = Played.of(outcome)
    assert sum(h.bytes for h in held_at(played.memory, outcome.peak.event)) == outcome.peak.bytes


def test_guides_are_pages() -> None:
    for name in SYMPTOMS:
        assert guide(name).startswith("# ") and len(guide(name)) > 500
