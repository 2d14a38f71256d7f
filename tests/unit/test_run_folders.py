"""What runs leave behind: one folder per set of changes, whole files only, figures that can be compared later."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from sim.report.compare import entry_names, gather
from sim.report.figure import FAR_APART, shared_scales
from sim.report.files import run_name, write_atomically
from sim.report.picture import Work, stream_lanes
from sim.report.read import read_summary
from tests.unit.scenarios import CHAIN, ROOT, TIGHT, TINY, sim, write


def names(folder: Path) -> list[str]:
    return [strategy.name for strategy in read_summary(folder / "summary.json").strategies]


# -- --set and --only ------------------------------------------------------------------------------------------------
def test_only_joins_the_other_strategies_of_the_same_scenario(tmp_path: Path) -> None:
    scenario = write(tmp_path, CHAIN)
    sim("run", scenario, "--out", tmp_path, "--only", "by-two")
    assert names(tmp_path / "mine") == ["by-two"]
    sim("run", scenario, "--out", tmp_path, "--only", "none")
    assert names(tmp_path / "mine") == ["none", "by-two"]
    both = (tmp_path / "mine" / "summary.json").read_bytes()
    sim("run", scenario, "--out", tmp_path)
    assert (tmp_path / "mine" / "summary.json").read_bytes() == both


def test_strategies_of_a_scenario_that_has_changed_are_dropped(tmp_path: Path) -> None:
    sim("run", write(tmp_path, CHAIN), "--out", tmp_path)
    changed = write(tmp_path, CHAIN.replace("layers: 6", "layers: 4"))
    sim("run", changed, "--out", tmp_path, "--only", "none")
    assert names(tmp_path / "mine") == ["none"]


def test_a_summary_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "summary.json").write_text("{}")
    assert sim("run", write(tmp_path, CHAIN), "--out", tmp_path, "--only", "none").exit_code == 0
    assert names(tmp_path / "mine") == ["none"]


def test_changes_have_a_folder_of_their_own_that_is_named(tmp_path: Path) -> None:
    scenario = write(tmp_path, CHAIN)
    sim("run", scenario, "--out", tmp_path)
    result = sim("run", scenario, "--out", tmp_path, "--set", TIGHT, "--set", "torch='2.13'", "--only", "by-two")
    folder = tmp_path / run_name(f"mine@{TIGHT},torch='2.13'")
    assert folder.name.startswith("mine@cluster.usable_memory=1_GiB,torch=_2.13_-")
    assert f"Files: {folder}/by-two/" in result.stdout
    assert result.stdout.startswith(f"mine@{TIGHT},torch='2.13'")
    assert (names(tmp_path / "mine"), names(folder)) == (["none", "by-two"], ["by-two"])
    assert list(read_summary(folder / "summary.json").overrides) == [TIGHT, "torch='2.13'"]


def test_titles_that_differ_have_folders_that_differ(tmp_path: Path) -> None:
    titles = ["x y", "x_y", "x  y", ".x_y", "x/y", "x" * 300, "x" * 299, "gru\u0308n", "gr\u00fcn"]
    assert len({run_name(title) for title in titles}) == len(titles)
    assert (run_name("x_y"), run_name("mine@batch.seq_len=4096")) == ("x_y", "mine@batch.seq_len=4096")
    for name in ("x y", "x_y"):
        sim("run", write(tmp_path, CHAIN, f"{name}.yaml"), "--out", tmp_path / "out", "--only", "none")
    assert sorted(read_summary(file).scenario for file in tmp_path.glob("out/*/summary.json")) == ["x y", "x_y"]


def test_json_and_files_agree_on_the_changes(tmp_path: Path) -> None:
    printed = json.loads(sim("run", write(tmp_path, CHAIN), "--no-files", "--json", "--set", TIGHT).stdout)
    assert printed["overrides"] == [TIGHT]


# -- rows of a comparison --------------------------------------------------------------------------------------------
def rows(*paths: Path) -> list[str]:
    return entry_names(gather(paths, jobs=1))


def test_rows_of_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    for folder in (one, two):
        folder.mkdir()
        sim("run", write(folder, CHAIN), "--out", folder, "--only", "none")
    monkeypatch.chdir(tmp_path)
    assert rows(Path("a/mine"), Path("b/mine")) == ["a/mine/none", "b/mine/none"]
    assert rows(Path("a/mine/none"), Path("b/mine/none")) == ["a/mine/none", "b/mine/none"]
    assert rows(Path("a/mine.yaml"), Path("b/mine.yaml")) == [
        f"{folder}/mine/{name}" for folder in "ab" for name in ("none", "by-two")
    ]
    assert rows(Path("a/mine"), Path("a/mine")) == ["a/mine/none", "a/mine/none (2)"]
    sim("run", "a/mine.yaml", "--out", "a", "--only", "none", "--set", TIGHT)
    assert rows(Path("a/mine"), Path("a", run_name(f"mine@{TIGHT}"))) == ["mine/none", f"mine@{TIGHT}/none"]


# -- whole files -----------------------------------------------------------------------------------------------------
def test_a_folder_in_the_place_of_a_file_is_called_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "mine" / "none" / "timeline.png").mkdir(parents=True)
    result = sim("run", write(tmp_path, CHAIN), "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"{tmp_path}/mine/none/timeline.png: cannot be written: is a directory\n"


def test_a_worker_that_is_ended_takes_its_unfinished_files_with_it(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from sim.report.runner import end_cleanly\n"
        "from sim.report.files import run_name, write_atomically\nend_cleanly()\n"
        f"write_atomically(Path({str(tmp_path / 'file')!r}), lambda file: (print('begun', flush=True), time.sleep(60)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)  # the process above sees it too, and terminates its workers
    assert [path.name for path in tmp_path.iterdir()] == [f".file.{process.pid}"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_errors_of_writing_name_the_file_not_its_temporary(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "no" / "file", lambda file: file.write(b""))
    assert caught.value.filename == str(tmp_path / "no" / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("verb", [["gpus"], ["presets"], ["schema"], ["--help"], ["run", "scenarios/chain.yaml"]])
def test_an_output_that_is_full_is_called_stdout(verb: list[str], tmp_path: Path) -> None:
    words = [*verb, "--out", str(tmp_path)] if verb[0] == "run" else verb
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sim", *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "stdout: cannot be written: no space left on device\n")


# -- figures ---------------------------------------------------------------------------------------------------------
def test_scales_are_shared_unless_they_lie_far_apart() -> None:
    assert shared_scales([1.0, 7.0, 50.0]) == [50.0] * 3
    assert shared_scales([1.0, 7.0, FAR_APART + 1.0]) == [1.0, 7.0, 51.0]


def test_signs_without_a_glyph_are_no_warning(tmp_path: Path) -> None:
    scenario = write(tmp_path, TINY.replace("none:", '"\u6a21\u578b":'))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sim("run", scenario, "--out", tmp_path).exit_code == 0
        assert sim("compare", tmp_path / "mine", "--out", tmp_path).exit_code == 0


def test_a_lane_says_for_which_share_of_a_pixel_something_runs() -> None:
    """900 pixels of 8 ns: work in all of the first, half of the second, none of the third, an instant of the fourth."""
    start, end = np.array([0.0, 8.0, 24.0]), np.array([8.0, 12.0, 24.1])
    zeros, no = np.zeros(3, np.int64), np.zeros(3, bool)
    (lane,) = stream_lanes(Work(zeros, zeros, no, no, start, end), 0.0, 7200.0)
    (spans,) = lane.work.values()
    assert np.round(spans * [1e6, 1e6, 8]).tolist() == [[0, 8, 8], [8, 16, 4], [24, 32, 1]]
