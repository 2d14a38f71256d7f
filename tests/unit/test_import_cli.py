"""`sim import` on the command line, and docs/import.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.api import load
from tests.unit.imports import BASE, FOLDER
from tests.unit.scenarios import ROOT, sim, write

PAGE = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
WRONG_SCRIPT = """torchrun --nproc_per_node 8 pretrain_gpt.py \\
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --bf16 \\
    --tensor-model-parallel-size 3 --vocab-size 50k
"""


def test_the_answer_to_a_wrong_script_is_the_one_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, WRONG_SCRIPT, "run.sh")
    monkeypatch.chdir(tmp_path)
    assert sim("import", "megatron", "run.sh").stderr == PAGE.split("```text\n")[1].split("```")[0]


def test_the_scenario_goes_to_stdout_and_the_account_to_stderr(tmp_path: Path) -> None:
    result = sim("import", "megatron", FOLDER / "gpt3_175b.sh", "--gpu", "a100")
    assert result.exit_code == 0
    assert load(write(tmp_path, result.stdout)).strategies[0].model.name == "gpt-3-175b"
    assert "line 14" in result.stderr and "assumed" in result.stderr


def test_a_file_is_written_whole_and_the_account_goes_to_stdout(tmp_path: Path) -> None:
    out = tmp_path / "scenario.yaml"
    result = sim("import", "hf", FOLDER / "llama_tiny/config.json", "--gpu", "h100", "--seq-len", 512, "--out", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert load(out).strategies[0].model.hidden == 512
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.yaml"]


def test_json_has_everything(tmp_path: Path) -> None:
    script = write(tmp_path, f"python pretrain_gpt.py {BASE} --tp-comm-overlap", "run.sh")
    result = sim("import", "megatron", script, "--gpu", "h100", "--json")
    said = json.loads(result.stdout)
    assert result.exit_code == 4
    assert [entry["name"] for entry in said["not_expressible"]] == ["--tp-comm-overlap"]
    assert said["scenario"].startswith("# From run.sh (Megatron-LM)")


WRONG = {
    "an unknown tool": (("megatrn", "{script}"), "did you mean megatron?"),
    "no such file": (("megatron", "nowhere.sh"), "no such file"),
    "a directory": (("megatron", "{folder}"), "is a directory"),
    "a GPU that is none": (("megatron", "{script}", "--gpu", "h1000"), "--gpu"),
    "a wrong change": (("megatron", "{script}", "--gpu", "h100", "--set", "batch.seq_len=8k"), "batch.seq_len"),
    "no command": (("megatron", "{empty}", "--gpu", "h100"), "no training command is found"),
    "an unwritable file": (
        ("megatron", "{script}", "--gpu", "h100", "--out", "{folder}/no/x.yaml"),
        "cannot be written",
    ),
}


@pytest.mark.parametrize("words, expected", WRONG.values(), ids=WRONG)
def test_wrong_input_exits_with_2(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    places = {
        "{script}": write(tmp_path, f"python pretrain_gpt.py {BASE}", "run.sh"),
        "{empty}": write(tmp_path, "echo", "empty.sh"),
        "{folder}": tmp_path,
        "{folder}/no/x.yaml": tmp_path / "no" / "x.yaml",
    }
    result = sim("import", *(places.get(word, word) for word in words))
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr
    assert "Traceback" not in result.output
