"""Scoring tables: resumed, in order, whatever the number of processes; a row that fails stops none."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from sim.checks import scoring
from sim.checks.scoring import RESULTS, score_row
from sim.checks.summary import markdown, summarize_file
from sim.report.validation import each
from tests.unit.published_rows import MPT, read_rows, row, write_table
from tests.unit.scenarios import sim

PIPELINED = {
    "source": "Korthikanti et al. 2022 (arXiv 2205.05198)", "model_name": "GPT small", "layers": "4", "hidden": "512",
    "ffn_hidden": "2048", "heads": "8", "kv_heads": "8", "vocab": "1024", "seq_len": "256", "mlp_type": "gelu",
    "attention": "standard", "gpu": "A100-SXM4-80GB (Selene)", "num_gpus": "4", "tp": "2", "sp": "yes", "pp": "2",
    "cp": "1", "dp": "1", "fsdp_or_zero": "none", "micro_batch": "1", "global_batch": "8", "precision": "fp16 mixed",
    "recompute": "none", "offload": "none", "compile": "no", "step_time_s": "1",
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [row(), row(MPT), row(precision="fp8"), row(micro_batch="4")]
    return write_table(tmp_path / "runs.csv", rows)


def test_every_row_comes_back_with_its_inputs_and_its_score(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "scored.csv"
    result = sim("validate", "--table", table, "--out", out, "--jobs", "1")
    assert result.exit_code == 0, result.stderr
    assert "1 not expressible, 3 scored" in result.stdout
    rows, inputs = read_rows(out), read_rows(table)
    assert list(rows[0]) == [*inputs[0], *RESULTS]
    assert [{name: r[name] for name in inputs[0]} for r in rows] == inputs
    assert [r["status"] for r in rows] == ["scored", "scored", "not expressible", "scored"]
    step, tokens = float(rows[0]["predicted_step_time_s"]), float(rows[0]["predicted_tokens_per_s_per_gpu"])
    assert tokens == pytest.approx(2 * 2 * 256 / step, rel=1e-4)
    assert float(rows[0]["time_error"]) == pytest.approx(100000 / tokens - 1, rel=1e-3)
    assert float(rows[0]["memory_error"]) == pytest.approx(
        float(rows[0]["predicted_peak_reserved_gib"]) / 0.5 - 1, rel=1e-3
    )
    assert rows[1]["memory_error"] == ""


def test_the_file_does_not_depend_on_the_number_of_processes(table: Path, tmp_path: Path) -> None:
    for jobs in (1, 3):
        assert sim("validate", "--table", table, "--out", tmp_path / f"{jobs}.csv", "--jobs", jobs).exit_code == 0
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "3.csv").read_bytes()


def test_rows_that_are_scored_are_not_scored_again(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "scored.csv"
    arguments = ("validate", "--table", table, "--out", out, "--jobs", "1")
    assert sim(*arguments).exit_code == 0
    rows = read_rows(out)
    rows[0]["predicted_step_time_s"] = "42"
    write_table(out, rows[:2])
    assert "2 from before" in sim(*arguments).stdout
    assert read_rows(out)[0]["predicted_step_time_s"] == "42"
    assert len(read_rows(out)) == 4
    assert sim(*arguments, "--again").exit_code == 0
    assert read_rows(out)[0]["predicted_step_time_s"] != "42"


def test_a_row_whose_inputs_changed_is_scored_again(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "scored.csv"
    assert sim("validate", "--table", table, "--out", out, "--jobs", "1").exit_code == 0
    write_table(table, [row(seq_len="512"), *read_rows(table)[1:]])
    assert "2 from before" in sim("validate", "--table", table, "--out", out, "--jobs", "1").stdout
    assert read_rows(out)[0]["seq_len"] == "512"


def test_one_row_never_stops_the_others(monkeypatch: pytest.MonkeyPatch, table: Path, tmp_path: Path) -> None:
    real = scoring.plan_of

    def broken(facts: object) -> object:
        if facts.text["source"].startswith("MosaicML"):  # type: ignore[attr-defined]
            raise RuntimeError("a mistake")
        return real(facts)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring, "plan_of", broken)
    out = tmp_path / "scored.csv"
    assert sim("validate", "--table", table, "--out", out, "--jobs", "1").exit_code == 0
    rows = read_rows(out)
    assert [r["status"] for r in rows] == ["scored", "failed", "not expressible", "scored"]
    assert rows[1]["reason"] == "RuntimeError: a mistake"


def test_a_row_that_takes_too_long_fails() -> None:
    score = score_row(row(layers="48", hidden="1024", global_batch="3200"), limit_s=0.02)
    assert (score.status, score.reason) == ("failed", "took longer than 0.02 s")


def die_on(victim: int, item: int) -> int:
    if item == victim:
        os._exit(1)
    return item * 10


def test_an_item_that_kills_its_process_is_answered_for() -> None:
    answers = dict(each(partial(die_on, 2), [0, 1, 2, 3], 2, lambda: -1))
    assert answers == {0: 0, 1: 10, 2: -1, 3: 30}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"a,b\n1,2\n", "columns layers, hidden, heads, seq_len, gpu, num_gpus, micro_batch, global_batch are missing"),
        (b"\xff\xfe\x00\x01", "is not a text file"),
        (b"layers,layers\n1,2\n", "columns layers are given twice"),
        (b"a,b\n1\n", "row 2 has 1 cells, not 2"),
        (b'a,b\n"1"x,2\n', "not CSV"),
    ],
)
def test_what_is_no_table_is_said(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.csv"
    file.write_bytes(content)
    result = sim("validate", "--table", file, "--out", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "out.csv").exists()


def test_a_table_without_rows_is_an_empty_scored_table(tmp_path: Path) -> None:
    write_table(tmp_path / "runs.csv", [row()])
    header = (tmp_path / "runs.csv").read_text().splitlines()[0]
    (tmp_path / "runs.csv").write_text(header + "\n")
    result = sim("validate", "--table", tmp_path / "runs.csv", "--out", tmp_path / "out.csv")
    assert (result.exit_code, read_rows(tmp_path / "out.csv")) == (0, [])
    assert "no rows" in result.stdout


def test_paths_that_cannot_be(table: Path, tmp_path: Path) -> None:
    for arguments, words in [
        (("--table", tmp_path / "none.csv", "--out", tmp_path / "out.csv"), "no such file"),
        (("--table", table), "go together"),
        (("--out", table), "go together"),
        (("--table", table, "--out", table), "is the table itself"),
        (("--summary", tmp_path / "none.csv"), "no such file"),
        (("--summary", table), "no scored table"),
    ]:
        result = sim("validate", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr


def test_a_file_that_is_something_else_is_not_overwritten(table: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious.csv"
    precious.write_text("a,b\n1,2\n")
    result = sim("validate", "--table", table, "--out", precious)
    assert result.exit_code == 2 and "holds no scores of these columns" in result.stderr
    assert precious.read_text() == "a,b\n1,2\n"


def test_no_draft_is_left(table: Path, tmp_path: Path) -> None:
    sim("validate", "--table", table, "--out", tmp_path / "scored" / "out.csv", "--jobs", "1")
    assert [file.name for file in (tmp_path / "scored").iterdir()] == ["out.csv"]


def test_the_summary_has_medians_and_ninth_deciles(tmp_path: Path) -> None:
    errors = ["-0.1", "0.2", "0.3", ""]
    rows = [row() | dict.fromkeys(RESULTS, "") | {"status": "scored", "time_error": error} for error in errors]
    rows.append(
        row() | dict.fromkeys(RESULTS, "") | {"status": "not expressible", "reason": "experts: no; gpu is not printed"}
    )
    rows.append(row() | dict.fromkeys(RESULTS, "") | {"status": "failed", "reason": "x"})
    file = write_table(tmp_path / "mine.csv", rows)
    summary = summarize_file(file)
    assert (summary.rows, summary.scored, summary.failed, summary.times) == (6, 4, 1, 3)
    assert summary.time_median == 0.2 and summary.time_bias == 0.2
    assert summary.time_p90 == pytest.approx(0.28)
    assert summary.memory_median is None
    assert summary.not_expressible == (("experts", 1), ("gpu is not printed", 1))
    assert "| mine | 6 | 4 (1 failed) | 3, 20.0 %, 28.0 %, +20.0 % |" in markdown([summary])
    printed = sim("validate", "--summary", tmp_path, "--json")
    assert json.loads(printed.stdout)[0]["times"] == 3


def test_large_pipelines_are_scored_without_an_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    large = row(PIPELINED)
    assert "without an allocator" not in score_row(large).reason
    monkeypatch.setattr(scoring, "MANY_PASSES", 1)
    score = score_row(large)
    assert score.status == "scored", score.reason
    assert "bytes without an allocator: reserved taken as allocated" in score.reason
