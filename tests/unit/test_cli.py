"""What the command line answers, and with which exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim import __version__
from tests.unit.scenarios import CHAIN, ROOT, TIGHT, TIGHTER, TINY, sim, write


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return write(tmp_path, CHAIN)


def test_a_run_that_fits_exits_with_0(chain: Path) -> None:
    result = sim("run", chain, "--no-files")
    assert result.exit_code == 0
    assert "by-two" in result.stdout


def test_one_strategy_that_fits_is_enough(chain: Path) -> None:
    result = sim("run", chain, "--no-files", "--set", TIGHT)
    assert result.exit_code == 0
    assert "Out of memory in the first step" in result.stdout.replace("\n", " ")


def test_strict_wants_all_strategies_to_fit(chain: Path) -> None:
    assert sim("run", chain, "--no-files", "--set", TIGHT, "--strict").exit_code == 3
    assert sim("run", chain, "--no-files", "--strict").exit_code == 0


def test_nothing_that_fits_exits_with_3(chain: Path) -> None:
    assert sim("run", chain, "--no-files", "--set", TIGHTER).exit_code == 3


def test_only_plays_the_strategies_that_are_named(chain: Path) -> None:
    run = json.loads(sim("run", chain, "--no-files", "--json", "--only", "by-two").stdout)
    assert [strategy["name"] for strategy in run["strategies"]] == ["by-two"]


WRONG = {
    "no such file": (("run", "nowhere.yaml"), "nowhere.yaml"),
    "a directory": (("run", "."), "is a directory"),
    "a wrong value": (("run", "{chain}", "--set", "model.chain.layers=some"), "model.chain.layers"),
    "an unknown field": (("run", "{chain}", "--set", "model.chane=1"), "did you mean chain"),
    "a set without a value": (("run", "{chain}", "--set", "model"), "--set"),
    "an unknown strategy": (("run", "{chain}", "--only", "by-too"), "did you mean by-two?"),
    "an unknown cost profile": (("run", "{chain}", "--set", "profile=h100"), "names such as h100-sxm, h100-nvl"),
    "an unknown framework": (
        ("run", "{tiny}", "--set", "host.framework=lazy"),
        "lazy: one of eager, megatron-deepspeed, none, transformers",
    ),
    "a wrong allocator": (("run", "{chain}", "--set", "allocator=bogus:1"), "no such option"),
    "an output that is a file": (("run", "{chain}", "--out", "{chain}"), "cannot be written"),
    "a folder without a run": (("compare", "{folder}"), "no summary.json"),
    "a summary that is none": (("compare", "{json}"), "not written by this version of sim"),
    "no jobs at all": (("run", "{chain}", "--jobs", "0"), "--jobs"),
    "an unknown command": (("walk",), "walk"),
    "no scenario": (("run",), "scenario"),
}


def test_a_comparison_tells_the_problems_of_all_scenarios(tmp_path: Path) -> None:
    one = write(tmp_path, TINY.replace("512", "8k"), "one.yaml")
    two = write(tmp_path, TINY.replace("h100", "h1000"), "two.yaml")
    result = sim("compare", one, two)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, "2 problems. Nothing was run.")
    assert f"{one}\n" in result.stderr and f"{two}\n" in result.stderr


@pytest.mark.parametrize("arguments, expected", WRONG.values(), ids=WRONG)
def test_wrong_input_exits_with_2_and_says_what_is_wrong(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    paths = {
        "{chain}": write(tmp_path, CHAIN),
        "{tiny}": write(tmp_path, TINY, "tiny.yaml"),
        "{json}": write(tmp_path, "{}", "no.json"),
        "{folder}": tmp_path,
    }
    result = sim(*(paths.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_folder_that_may_not_be_written_exits_with_2(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: mode == os.R_OK)
    result = sim("run", chain, "--out", tmp_path / "out")
    assert (result.exit_code, "permission denied" in result.stderr) == (2, True), result.stderr


def test_a_full_disk_exits_with_2(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sim.report.runner.write_files", full)
    result = sim("run", chain, "--out", tmp_path / "out")
    assert (result.exit_code, "no space left on device" in result.stderr) == (2, True)


def test_a_deadlock_is_told_without_a_traceback(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.engine.deadlock import DeadlockError, Stuck

    def stuck(*_: object) -> None:
        raise DeadlockError([Stuck(0, 1, 2, "waits for event 3")])

    monkeypatch.setattr("sim.report.runner.simulate_setup", stuck)
    result = sim("run", chain, "--no-files")
    assert result.exit_code == 2
    assert result.stderr == "strategy none: deadlock:\n  rank 0 stream 1 at row 2 waits for event 3\n"


def test_a_bug_is_one_line_and_exits_with_1(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("sim.report.runner.simulate_setup", broken)
    result = sim("run", chain, "--no-files")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)


def test_ctrl_c_is_one_line_and_exits_with_130(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.report.runner.simulate_setup", interrupted)
    result = sim("run", chain, "--no-files")
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


def test_ctrl_c_ends_the_worker_processes_too(tmp_path: Path) -> None:
    """A model that takes long, interrupted in the middle."""
    scenario = write(tmp_path, TINY)
    words = ("run", scenario, "--no-files", "--jobs", "2", "--set", "model.layers=10000")
    process = _start(words, start_new_session=True)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until = time.monotonic() + 120
        while children.exists() and len(children.read_text().split()) < 2 and time.monotonic() < until:
            time.sleep(0.1)  # before the workers play, imports could swallow the signal
        time.sleep(2 if children.exists() else 5)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    # CPython ends by the signal itself where it came while a string was executed, as dataclasses do: 130 in the shell.
    assert process.returncode in (130, -signal.SIGINT) and stderr == "Interrupted.\n"


def _hear_interrupts() -> None:
    """A shell's background jobs ignore interrupts, and so would what the tests start there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start(words: tuple[object, ...], **options: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sim", *(str(word) for word in words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, preexec_fn=_hear_interrupts, **options
    )


def test_a_real_process_prints_json_only_and_imports_nothing_heavy(tmp_path: Path) -> None:
    scenario = write(tmp_path, TINY)
    code = (
        "import sys; from sim.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print([m for m in ('matplotlib', 'pandas', 'pyarrow', 'scipy', 'torch') if m in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "run", str(scenario), "--json", "--no-files"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["scenario"] == "mine"
    assert result.stderr == "[]\n"


def test_processes_do_not_change_the_answer(tmp_path: Path) -> None:
    scenario = write(tmp_path, TINY)
    answers = [_start(("run", scenario, "--no-files", "--json", "--jobs", jobs)).communicate() for jobs in (1, 2)]
    assert answers[0] == answers[1]


def test_output_survives_a_terminal_without_unicode(tmp_path: Path) -> None:
    scenario = write(tmp_path, CHAIN.replace("by-two", "zu-zweit-\u00fcberpr\u00fcft"), "gr\u00f6\u00dfe.yaml")
    command = [sys.executable, "-m", "sim", "run", str(scenario), "--no-files"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True).returncode == 0


def test_schema_prints_a_json_schema() -> None:
    assert json.loads(sim("schema").stdout)["type"] == "object"


def test_catalogues_are_listed() -> None:
    assert "h100-sxm-80gb" in sim("gpus").stdout
    assert "llama-3.1-8b" in sim("presets").stdout


def test_version_is_the_packages() -> None:
    assert sim("--version").stdout == f"sim {__version__}\n"


@pytest.mark.parametrize("verb", ["run", "compare", "schema", "gpus", "presets"])
def test_every_verb_has_an_example_in_its_help(verb: str) -> None:
    assert f"python -m sim {verb}" in sim(verb, "--help").stdout
