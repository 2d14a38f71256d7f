"""The README shows every verb, and its scenario is one; test_documents.py runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sim.api import load
from tests.unit.scenarios import ROOT, sim, write

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (?:.*&& )?(python -m sim .*)$", README, re.M)
SCENARIO = README.split("```yaml\n")[1].split("```")[0]
ANSWER = README.split("```text\n")[1].split("```")[0]


def test_the_readme_shows_every_verb() -> None:
    verbs = {
        "run",
        "calibrate",
        "compare",
        "diff",
        "explain",
        "export",
        "fields",
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
    assert "    pip install -e '.[test]' && pytest -n auto --dist loadfile\n" in README


def test_the_scenario_of_the_readme_is_one(tmp_path: Path) -> None:
    path = write(tmp_path, SCENARIO)
    assert [setup.name for setup in load(path).strategies] == ["none", "full", "long"]


def test_the_answer_to_a_wrong_scenario_is_the_one_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SCENARIO.replace("seq_len: 4096", "seq_len: 8k").replace(
        "implementation: transformers", "implementation: torchtian"
    )
    (tmp_path / "scenarios").mkdir()
    write(tmp_path / "scenarios", wrong)
    monkeypatch.chdir(tmp_path)
    assert sim("run", "scenarios/mine.yaml").stderr == ANSWER


def test_pictures_of_the_readme_exist_and_are_small() -> None:
    for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert 10_000 < (ROOT / link).stat().st_size < 200_000


def test_the_chinese_readme_gives_commands_and_the_scenario_of_this_one() -> None:
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    assert re.findall(r"^    (\S.*)$", chinese, re.M) == re.findall(r"^    (\S.*)$", README, re.M)
    english, translated = (set(re.findall(r"\]\(((?!http)[^)]+)\)", text)) for text in (README, chinese))
    assert english == translated
    scenario = chinese.split("```yaml\n")[1].split("```")[0]
    assert scenario.splitlines()[1:] == SCENARIO.splitlines()[1:]
