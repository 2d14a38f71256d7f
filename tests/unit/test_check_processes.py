"""The check of a scenario, one process or group of ranks per strategy, run on processors in the place of GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from calibration.check import command, processes
from calibration.check.bench import BENCHES, TRACE
from calibration.check.outcome import Outcome
from calibration.check.processes import Ran, check_scenario
from calibration.check.step import problems_of
from calibration.check.worker import STEPS
from sim.cli.verbs import app
from sim.scenario import load_text

TINY = """
model: {preset: llama-tiny, implementation: torchtitan, layers: 2, hidden: 32, ffn_hidden: 64, heads: 2, kv_heads: 1,
        vocab: 64, max_positions: 16}
cluster: {gpu: h100, gpus_per_node: 2, nodes: 1}
batch: {micro_batch: 1, seq_len: 16}
parallel: {fsdp: {degree: 2}}
precision: {parameters: fp32, compute: bf16}
optimizer: {name: adamw, variant: fused, clip_norm: 1.0}
strategies:
  full: {checkpoint: {every: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check")


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Outcome:
    scenario = folder / "tiny.yaml"
    scenario.write_text(TINY)
    return check_scenario(scenario, "cpu", folder / "runs")


def test_two_ranks_run_under_fsdp_and_the_slowest_counts(outcome: Outcome, folder: Path) -> None:
    ranks = [json.loads((folder / "runs" / "full" / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(len(rank["step_ns"]) == STEPS for rank in ranks)
    ran = Ran.of(folder / "runs" / "full", 2)
    assert ran.step_ns == [max(pair) for pair in zip(*(rank["step_ns"] for rank in ranks))]
    assert ran.allocated_bytes == max(rank["allocated_bytes"] for rank in ranks) > 0
    (line,) = outcome.lines
    assert line.measured_peak_bytes == ran.allocated_bytes
    assert line.predicted_reserved_bytes is not None and line.predicted_reserved_bytes >= line.predicted_peak_bytes


def test_the_trace_is_one_that_diff_reads(outcome: Outcome, folder: Path) -> None:
    trace = folder / "runs" / "full" / TRACE
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert outcome.machine["traces"] == str(folder / "runs")


def test_what_cannot_be_run_is_refused_all_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(
        TINY.replace("strategies:", "strategies:\n  more: {batch: {accumulation: 2}, optimizer: {name: sgd}}")
    )
    answer = command.check("cuda", file, 5, 0, short=False, keep=tmp_path / "runs", as_json=False, strict=False)
    said = capsys.readouterr().err
    assert answer == command.WRONG_INPUT and not (tmp_path / "runs").exists()
    assert "more: batch.accumulation: one micro-batch per step" in said and "more: optimizer: adamw" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_user_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    answer = command.check("cuda", tmp_path / "tiny.yaml", 5, 0, False, tmp_path / "runs", False, False)
    assert answer == command.WRONG_INPUT and "no CUDA device" in capsys.readouterr().err


def test_a_scenario_is_asked_for_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.check("cuda", None, 5, 0, short=False, keep=None, as_json=False, strict=False) == command.WRONG_INPUT
    assert "--scenario" in capsys.readouterr().err


def test_the_checks_own_networks_are_refused_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command.check("cpu", tmp_path, 5, 0, short=True, keep=None, as_json=False, strict=False) == command.WRONG_INPUT
    )
    assert "networks of its own" in capsys.readouterr().err


def test_what_a_failed_process_said_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(command_line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command_line[0] == sys.executable
        return subprocess.CompletedProcess(command_line, 1, "", "first\nCUDA out of memory")

    monkeypatch.setattr(processes.subprocess, "run", failed)
    (tmp_path / "tiny.yaml").write_text(TINY)
    with pytest.raises(ValueError, match="full: its process ended with 1:\nfirst\nCUDA out of memory"):
        check_scenario(tmp_path / "tiny.yaml", "cpu", tmp_path / "runs")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("model: {implementation: transformers}", "model"),
        ("model: {dropout: 0.1, preset: gpt-tiny, implementation: nanogpt}", "model.dropout"),
        ("checkpoint: {nested: [2]}", "checkpoint"),
        ("precision: {parameters: bf16, compute: fp32}", "precision"),
        ("parallel: {fsdp: {degree: 2, gradient_sync: last}}", "parallel.fsdp"),
    ],
)
def test_each_choice_that_is_not_written_is_named(change: str, field: str) -> None:
    text = TINY.replace("strategies:", f"strategies:\n  other: {{{change}}}")
    try:
        setup = load_text(text).strategies[0]
    except Exception:
        pytest.skip("the scenario itself refuses it")
    assert any(problem.startswith(field) for problem in problems_of(setup))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "cpu", "--short", "--strict"], ["--short: only with --check", "--strict: only with --check"]),
        (
            ["--device", "cpu", "--check", "--only", "gemm", "--out", "a.yaml"],
            ["--only: not with --check", "--out: not"],
        ),
        (["--device", "tpu", "--check"], ["--device tpu: one of cuda, cpu"]),
    ],
)
def test_the_verb_refuses_what_does_not_belong_together(flags: list[str], said: list[str]) -> None:
    answer = CliRunner().invoke(app, ["calibrate", *flags])
    assert answer.exit_code == command.WRONG_INPUT
    assert all(text in answer.output for text in said)


def test_a_file_of_another_kind_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a line of rounds\n")
    assert command.check("cpu", None, 5, 1, short=True, keep=file, as_json=True, strict=False) == command.WRONG_INPUT
    assert "no file of the check's measurements" in capsys.readouterr().err
    assert file.read_text() == "not a line of rounds\n"


def test_both_devices_have_the_same_interface() -> None:
    """CUDA's has not run on a GPU."""
    assert set(BENCHES) == {"cpu", "cuda"}
    for bench in BENCHES.values():
        assert all(hasattr(bench, name) for name in ("backend", "time_ns", "peaks", "trace"))
