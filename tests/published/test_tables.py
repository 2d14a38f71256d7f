"""The lines of docs/validation.md are what scoring the published tables gives. Takes minutes: SIM_TABLES=1 runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.checks.summary import markdown, summarize_file
from sim.report.validation import score_table

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SIM_SHARED", ROOT.parent / "shared"))
PUBLISHED = SHARED / "data" / "published"
DOCUMENTED = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
SLOW = ("13_", "14_", "15_", "05_")
"""Long pipelines: their lines depend on the time that a row may take."""
FILES = [file for file in sorted(PUBLISHED.glob("*.csv")) if f"| {file.stem} |" in DOCUMENTED]


@pytest.mark.skipif("SIM_TABLES" not in os.environ, reason="SIM_TABLES=1 scores the published tables")
@pytest.mark.parametrize("file", [file for file in FILES if not file.name.startswith(SLOW)], ids=lambda file: file.stem)
def test_a_documented_line_is_what_scoring_gives(file: Path, tmp_path: Path) -> None:
    scored = score_table(file, tmp_path / file.name)
    assert "failed" not in scored.counts
    assert markdown([summarize_file(scored.path)]).splitlines()[-1] in DOCUMENTED
