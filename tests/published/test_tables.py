"""The table of docs/validation.md is what scoring the published tables gives. Takes minutes: SIM_TABLES=1 runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.checks.summary import markdown, summarize_file
from sim.report.validation import score_table

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SIM_SHARED", ROOT.parent / "shared"))
PUBLISHED = SHARED / "data" / "published"
OWN_COLUMNS = ("15b_", "30_", "31_")


@pytest.mark.skipif("SIM_TABLES" not in os.environ, reason="SIM_TABLES=1 scores all published tables")
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published tables are not here (SIM_SHARED names their folder)")
def test_the_documented_table_is_what_scoring_gives(tmp_path: Path) -> None:
    files = [file for file in sorted(PUBLISHED.glob("*.csv")) if not file.name.startswith(OWN_COLUMNS)]
    scored = [score_table(file, tmp_path / file.name) for file in files]
    assert all("failed" not in table.counts for table in scored)
    assert markdown([summarize_file(table.path) for table in scored]) in (ROOT / "docs/validation.md").read_text()
