"""Every command and every scenario of the README works as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sim.api import load
from tests.unit.scenarios import ROOT, sim, write

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (?:.*&& )?(python -m sim .*)$", README, re.M)
SCENARIO = README.split("```yaml\n")[1].split("```")[0]
ANSWER = README.split("```text\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scenarios, in which the commands run one after the other."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "scenarios", folder / "scenarios")
    return folder


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_of_the_readme_works(command: str, checkout: Path) -> None:
    if "out/fsdp_ckpt" in command and not (checkout / "out/fsdp_ckpt").exists():
        call(COMMANDS[0], checkout)  # what the reader has typed by then
    result = call(command, checkout)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr


def call(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = command.replace("python", sys.executable, 1)
    return subprocess.run(words, shell=True, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_readme_shows_every_verb() -> None:
    verbs = {
        "run",
        "calibrate",
        "compare",
        "diff",
        "explain",
        "export",
        "gpus",
        "import",
        "presets",
        "report",
        "schema",
        "validate",
    }
    assert {command.split()[3] for command in COMMANDS} >= verbs


def test_the_readme_has_the_two_set_up_commands() -> None:
    assert "    pip install -e . && python -m sim run scenarios/fsdp_ckpt.yaml\n" in README
    assert "    pip install -e '.[test]' && pytest\n" in README


def test_the_scenario_of_the_readme_is_one(tmp_path: Path) -> None:
    path = write(tmp_path, SCENARIO)
    assert [setup.name for setup in load(path).strategies] == ["none", "full", "long"]


def test_the_answer_to_a_wrong_scenario_is_the_one_shown(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SCENARIO.replace("seq_len: 4096", "seq_len: 8k").replace(
        "implementation: transformers", "implementation: torchtian"
    )
    write(checkout / "scenarios", wrong)
    monkeypatch.chdir(checkout)
    assert sim("run", "scenarios/mine.yaml").stderr == ANSWER


def test_pictures_of_the_readme_exist_and_are_small() -> None:
    for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert 10_000 < (ROOT / link).stat().st_size < 200_000


def test_the_chinese_readme_gives_commands_and_the_scenario_of_this_one() -> None:
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^    (?:.*&& )?(python -m sim .*)$", chinese, re.M))
    assert len(commands) > 10 and commands <= set(COMMANDS)
    scenario = chinese.split("```yaml\n")[1].split("```")[0]
    assert scenario.splitlines()[1:] == SCENARIO.splitlines()[1:]
