"""What the screen, the JSON and the comparison say about known runs."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from sim.api import Result, load, simulate
from sim.plan.micro_batch import LARGEST_CONSIDERED
from sim.report.console import make_console, show_run
from sim.report.evidence import evidence
from sim.report.files import folder_names, run_name
from sim.report.levers import find_lever
from sim.report.picture import STALL, Picture
from sim.report.progress import Progress
from sim.report.read import read_run, read_summary
from sim.report.summary import RunSummary, summarize, summarize_run, to_json
from sim.scenario import load_text
from tests.unit.scenarios import CHAIN, PIPELINE, ROOT, TIGHT, TINY, sim, write

MIB = 1 << 20
OFFLOADED = TINY.partition("strategies:")[0] + "strategies:\n  activations: {offload: {what: activations}}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def chain(folder: Path) -> Result:
    return simulate(load(write(folder, CHAIN, "chain.yaml")))


@pytest.fixture(scope="module")
def tight(folder: Path) -> Result:
    return simulate(load(write(folder, CHAIN, "chain.yaml"), [TIGHT]))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Result:
    return simulate(load(write(folder, TINY, "tiny.yaml")))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Result:
    return simulate(load(write(folder, PIPELINE, "pipeline.yaml")))


@pytest.fixture(scope="module")
def offloaded(folder: Path) -> Result:
    """Activations on side streams, with a bound that makes the step wait; inputs whose copies hide; a host too small."""
    text = TINY.partition("strategies:")[0].replace("gpus_per_node: 2", "gpus_per_node: 2, host_memory: 32 MiB")
    text = text.replace("seq_len: 512", "seq_len: 4096") + (
        "strategies:\n"
        "  activations: {offload: {what: activations}}\n"
        "  inputs: {checkpoint: {}, offload: {what: checkpoint_inputs, layers: [0, 1], streams: side}}\n"
    )
    return simulate(load(write(folder, text, "offloaded.yaml")))


def summary(result: Result) -> RunSummary:
    return summarize_run(result.scenario, tuple(summarize(outcome, 7) for outcome in result.outcomes))


def screen(run: RunSummary, width: int, capsys: pytest.CaptureFixture[str]) -> str:
    console = make_console()
    console.width = width
    show_run(console, run)
    return capsys.readouterr().out


# -- figures ---------------------------------------------------------------------------------------------------------
def test_owners_sum_to_the_active_peak(tiny: Result) -> None:
    for outcome in tiny.outcomes:
        strategy = summarize(outcome)
        assert sum(strategy.peak.owners.values()) == strategy.peak_active_bytes
        assert list(strategy.peak.owners.values()) == sorted(strategy.peak.owners.values(), reverse=True)


def test_bytes_awaited_by_a_stream_get_an_owner_of_their_own(tiny: Result) -> None:
    outcome = tiny.outcomes[0]
    later = replace(outcome, peak=replace(outcome.peak, bytes=outcome.peak.bytes + 512))
    assert summarize(later).peak.owners["freed, awaited by a stream"] == 512


def test_headroom_is_usable_bytes_less_all_device_use(tiny: Result) -> None:
    strategy = summarize(tiny.outcomes[0])
    outside = strategy.context_bytes + strategy.communicator_bytes
    assert strategy.peak_device_bytes == strategy.peak_reserved_bytes + outside
    assert strategy.headroom_bytes == strategy.usable_device_bytes - strategy.peak_device_bytes


def test_out_of_memory_tells_who_was_alive(tight: Result) -> None:
    strategy = summarize(tight["none"])
    assert strategy.oom is not None
    assert (strategy.fits, strategy.step_time_s, strategy.peak_active_bytes) == (False, None, 6 * 128 * MIB)
    assert (strategy.oom.step, strategy.oom.phase, strategy.oom.layer) == (0, "forward", "layers.4")
    assert strategy.oom.alive == {"activations": 4 * 128 * MIB}
    assert strategy.oom.allocated_bytes == 4 * 128 * MIB


def test_out_of_memory_before_the_first_step_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(load(write(folder, TINY, "tiny.yaml"), ["cluster.usable_memory=1 MiB"]))
    strategy = summarize(result.outcomes[0])
    assert strategy.oom is not None and strategy.oom.step == -1
    assert "Out of memory in set-up" in screen(summary(result), 200, capsys)


def test_a_lever_is_the_peak_without_an_owner(chain: Result) -> None:
    """Segments of two out of six layers: three entries stay, and the forward holds one layer beside them."""
    lever = find_lever(chain["by-two"])
    assert lever is not None
    assert (lever.owner, lever.measure) == ("recomputed activations", "shorter regions")
    assert (lever.peak_bytes, lever.phase) == ((3 * 16 + 128) * MIB, "forward")


@pytest.mark.parametrize(
    ("text", "version", "label"),
    [
        (TINY, "2.14", "exact"),
        (TINY, "2.14.1", "exact"),
        (TINY, "2.13", "close"),
        (TINY, "1.0", "close"),
        (CHAIN, "2.9", "exact"),
        (CHAIN, "2.10", "close"),
        (CHAIN, "99.99", "close"),
    ],
)
def test_bytes_are_exact_only_of_versions_that_were_recorded(text: str, version: str, label: str) -> None:
    (setup, *_) = load_text(text, overrides=[f'torch="{version}"']).strategies
    assert evidence(setup)["bytes"].label == label


def test_tokens_are_counted_over_all_gpus(tiny: Result) -> None:
    assert summarize(tiny.outcomes[0]).tokens_per_step == 2 * 512 * 2


# -- JSON ------------------------------------------------------------------------------------------------------------
def keys(value: Any, prefix: str = "") -> set[str]:
    """Dotted paths of all keys; a list is `[]`, an object with varying keys (owners) is `{}`."""
    found = set()
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, dict):
            varying = key in ("owners", "alive", "bytes_per_parameter", "copy_over_compute")
            found |= {f"{path}{{}}"} if varying else keys(inner, f"{path}.")
        elif isinstance(inner, list):
            found |= {f"{path}[]"}
        else:
            found |= {path}
    return found


def documented(heading: str) -> set[str]:
    text = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.split(heading)[1].split("\n## ")[0].split("\n# ")[0].split("\n`memory.parquet`")[0]
    return {match[1] for match in re.finditer(r"^\| `([^`]+)` \|", section, re.M)}


def test_every_key_is_documented_and_every_documented_key_is_there(
    chain: Result, tiny: Result, tight: Result, offloaded: Result
) -> None:
    real: set[str] = set()
    for result in (chain, tiny, tight, offloaded):
        run = json.loads(to_json(summary(result)))
        assert keys({**run, "strategies": []}) == documented("## The run")
        for strategy in run["strategies"]:
            real |= keys(strategy)
    optional = {"lever", "oom", "offload"}  # null, or an object
    nullable = {"recompute_overhead"}
    assert real - nullable == documented("## A strategy") - (optional - real)


def test_every_key_of_a_pipeline_rank_is_documented(pipeline: Result) -> None:
    for strategy in json.loads(to_json(summary(pipeline)))["strategies"]:
        assert len(strategy["stages"]) == 2
        for stage in strategy["stages"]:
            assert keys(stage) == documented("## A pipeline rank")


def test_a_summary_is_read_back_as_it_was(tiny: Result, pipeline: Result, tmp_path: Path) -> None:
    for result in (tiny, pipeline):
        run = summary(result)
        file = tmp_path / "summary.json"
        file.write_text(to_json(run), encoding="utf-8")
        assert read_summary(file) == run


def test_a_pipeline_shows_its_worst_stage_and_its_bubble(pipeline: Result, capsys: pytest.CaptureFixture[str]) -> None:
    text = screen(summary(pipeline), 200, capsys)
    for outcome in pipeline.outcomes:
        assert outcome.bubble_fraction is not None
        assert f"GiB in {outcome.worst.name}, " in text or f"MiB in {outcome.worst.name}, " in text
        assert f"{100 * outcome.bubble_fraction:.1f}%" in text
        assert outcome.worst.steady.device_bytes == max(rank.steady.device_bytes for rank in outcome.ranks)


def test_a_pipeline_is_drawn_as_the_compute_lanes_of_its_stages(pipeline: Result) -> None:
    from sim.api import shown_lanes
    from sim.report.picture import picture_of

    pictures = [picture_of(outcome, shown_lanes(outcome)) for outcome in pipeline.outcomes]
    assert [lane.name for lane in pictures[0].lanes] == ["stage 0", "stage 1"]
    assert [lane.name for lane in pictures[1].lanes] == ["stages 0, 2, 4", "stages 1, 3, 5"]
    assert all({"forward", "backward"} <= set(lane.work) for picture in pictures for lane in picture.lanes)


# -- the screen ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_word_is_broken_or_lost_at_any_width(
    width: int, tiny: Result, tight: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in (summary(tiny), summary(tight)):
        text = screen(run, width, capsys)
        assert all(len(line) <= width for line in text.splitlines())
        assert words(text) == words(screen(run, 400, capsys))


def words(text: str) -> set[str]:
    return {word for word in text.split() if not word.startswith("\u2500")}


def test_a_comparison_breaks_no_word_either(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for width in ("60", "80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        shown.append(sim("compare", write(folder, TINY, "tiny.yaml"), "--no-files").stdout)
        assert all(len(line) <= int(width) for line in shown[-1].splitlines())
    assert words(shown[0]) == words(shown[1]) == words(shown[2])


def test_the_first_and_later_steps_are_joined_by_no_sign_of_order(
    tiny: Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = summary(tiny)
    some = replace(run.strategies[0], first_step=replace(run.strategies[0].first_step, peak_active_bytes=7 << 30))
    run = replace(run, strategies=(some,))
    text = screen(run, 120, capsys)
    assert "7,168 \u2192 " in text.replace("7,168.0", "7,168") and " > " not in text
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show_run(make_console(ascii_only), run)
    ascii_only.flush()
    plain = ascii_only.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert " to " in plain and "first to later" in plain and "+-" in plain


def test_a_search_that_ended_at_its_limit_says_so(tiny: Result, capsys: pytest.CaptureFixture[str]) -> None:
    capped, certain = summarize(tiny.outcomes[0], LARGEST_CONSIDERED), summarize(tiny.outcomes[1], 7)
    assert (capped.largest_micro_batch_is_lower_bound, certain.largest_micro_batch_is_lower_bound) == (True, False)
    assert ">= 4,096" in screen(replace(summary(tiny), strategies=(capped, certain)), 120, capsys)


def test_what_holds_for_some_strategies_only_names_them(tiny: Result, capsys: pytest.CaptureFixture[str]) -> None:
    none, full = summary(tiny).strategies
    run = replace(summary(tiny), strategies=(none, replace(full, communicator_bytes=0)))
    text = screen(run, 400, capsys)
    assert "\nnone: Device use: reserved + context + communicators." in text
    assert "\nfull: Device use: reserved + context." in text
    assert "\nDevice use: " in screen(summary(tiny), 400, capsys)


def test_a_screen_names_the_cause_of_a_peak(tight: Result, capsys: pytest.CaptureFixture[str]) -> None:
    text = screen(summary(tight), 200, capsys)
    assert "would peak at 768 MiB in layers.5 forward, chain.layer: activations 768." in text
    assert "no, 256 short" in text
    assert "Out of memory in the first step, layers.4 forward (chain.layer): tried to allocate 128 MiB" in text


def test_a_screen_says_what_figures_rest_on(tiny: Result, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(screen(summary(tiny), 100, capsys).split())
    assert "Bytes and counts: exact." in text
    assert "Times: assumed. Cost profile h100-sxm" in text
    assert "context 512 MiB (assumed" in text and "communicators 688 MiB (assumed" in text
    assert "MFU: 6 * P + 12 * L * A * D * S" in text


def test_a_screen_says_whether_copies_hide_and_whether_the_host_is_large_enough(
    offloaded: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(screen(summary(offloaded), 300, capsys).split())
    assert "copies run and nothing computes" in text and "until tensors have left" in text
    assert "Copies hide behind compute." in text
    assert "per node is needed, 32.0 MiB are there." in text
    assert "Host memory of a node: given: set in the scenario." in text


def test_copies_are_lanes_of_a_run_read_back(tmp_path: Path) -> None:
    result = sim("run", write(tmp_path, OFFLOADED), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    ((_, _, picture, _),) = read_run(tmp_path / "out" / "mine")
    assert picture is not None
    assert {"to host", "from host"} <= {lane.name for lane in picture.lanes}
    assert STALL in picture.lanes[0].work
    assert picture.host is not None and picture.host[1].max() > 0


def test_names_are_shown_as_they_are(chain: Result, capsys: pytest.CaptureFixture[str]) -> None:
    run = summary(chain)
    odd = tuple(replace(s, name=f"[bold]{s.name}[/] :smile:") for s in run.strategies)
    assert "[bold]none[/] :smile:" in screen(replace(run, strategies=odd), 120, capsys)


# -- progress --------------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_itself_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for patience_s in (0.0, 60.0):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setattr("sim.report.progress.PATIENCE_S", patience_s)
        with Progress(2) as progress:
            assert progress.past("answer") == "answer"
            time.sleep(0.5)
        shown[patience_s] = terminal.getvalue()
    assert "1/2" in shown[0.0]
    assert shown[60.0] == ""


# -- folders and comparison --------------------------------------------------------------------------------------------
def test_folder_names_are_safe_and_distinct() -> None:
    names = ["a/b", "a b", "A_B", "..", "", "x" * 300, "gr\u00f6\u00dfe", "every-2"]
    long = f"{'x' * 71}-{sha256(b'x' * 300).hexdigest()[:8]}"
    assert folder_names(names) == ["a_b", "a_b-2", "A_B-3", "_", "_-2", long, "gr\u00f6\u00dfe", "every-2"]


def test_a_comparison_gives_deltas_against_the_first(folder: Path, tmp_path: Path) -> None:
    result = sim("compare", write(folder, CHAIN, "chain.yaml"), "--out", tmp_path)
    row = next(line.split() for line in result.stdout.splitlines() if line.startswith("by-two"))
    assert row[1:8] == ["24.0", "ms", "+33.3%", "304", "-464", "400", "-368"]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sim("compare", tmp_path / "chain.yaml", "--svg").exit_code == 2  # nothing there
    assert sim("compare", write(folder, CHAIN, "chain.yaml"), "--svg", "--out", tmp_path).exit_code == 0
    assert b"<svg" in (tmp_path / "compare.svg").read_bytes()[:1000]


def test_a_comparison_warns_when_tokens_differ(folder: Path, tmp_path: Path) -> None:
    one = write(folder, TINY, "one.yaml")
    two = write(folder, TINY.replace("micro_batch: 2", "micro_batch: 4"), "two.yaml")
    result = sim("compare", one, two, "--no-files")
    assert result.stderr == ("warning: tokens per step differ (2,048, 4,096): compare tokens/s/GPU, not step times\n")
    assert "two/full" in result.stdout
    assert sim("compare", one, "--no-files").stderr == ""


def test_a_run_folder_is_compared_as_the_scenario_itself(folder: Path, tmp_path: Path) -> None:
    scenario = write(folder, TINY, "tiny.yaml")
    assert sim("run", scenario, "--out", tmp_path).exit_code == 0
    from_files = read_run(tmp_path / "tiny")
    assert [strategy.name for _, strategy, *_ in from_files] == ["none", "full"]
    played = sim("compare", scenario, "--no-files").stdout
    assert sim("compare", tmp_path / "tiny", "--no-files").stdout == played
    assert sim("compare", tmp_path / "tiny" / "none", tmp_path / "tiny" / "full", "--no-files").stdout == played


def test_a_picture_read_back_has_the_same_peak_and_lanes(tiny: Result, folder: Path, tmp_path: Path) -> None:
    from sim.api import shown_lanes
    from sim.report.picture import picture_of

    sim("run", write(folder, TINY, "tiny.yaml"), "--out", tmp_path)
    for outcome, (_, strategy, read, _) in zip(tiny.outcomes, read_run(tmp_path / "tiny")):
        made = picture_of(outcome, shown_lanes(outcome))
        assert read is not None and read.peak_bytes == strategy.peak_active_bytes
        assert pictured(read) == pictured(made)


def test_what_does_not_fit_is_drawn_from_a_run_folder_too(folder: Path, tmp_path: Path) -> None:
    sim("run", write(folder, CHAIN, "chain.yaml"), "--out", tmp_path, "--set", TIGHT)
    none, by_two = (picture for _, _, picture, _ in read_run(tmp_path / run_name(f"chain@{TIGHT}")))
    assert none is not None and by_two is not None
    assert (none.fits, by_two.fits) == (False, True)
    assert none.peak_bytes == 6 * 128 * MIB and none.reserved_bytes.max() >= none.peak_bytes


def pictured(picture: Picture) -> dict[str, Any]:
    """Everything in a picture, arrays as lists."""
    plain = {field.name: getattr(picture, field.name) for field in fields(picture)}
    plain |= {name: plain[name].tolist() for name in ("times_ms", "reserved_bytes")}
    plain["owners"] = {name: curve.tolist() for name, curve in picture.owners.items()}
    plain["lanes"] = [(lane.name, {kind: t.tolist() for kind, t in lane.work.items()}) for lane in picture.lanes]
    return plain
