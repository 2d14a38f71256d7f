"""Published runs as data: memory within the stated tolerance, time within what the profile itself claims to know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import sim

ROOT = Path(__file__).resolve().parents[2]
CASES = YAML(typ="safe").load((ROOT / "tests/published/cases.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["source"] for case in CASES])
def test_a_published_run_is_met(case: dict[str, Any]) -> None:
    outcome = sim.simulate(ROOT / case["scenario"])[case["strategy"]]
    reserved_gib = outcome.steady.reserved_bytes / 2**30
    assert abs(reserved_gib / case["peak_reserved_gib"] - 1) < case["memory_tolerance"]
    assert outcome.utilization is not None and outcome.step_sigma is not None
    ratio = outcome.utilization.tokens_per_s_per_gpu / case["tokens_per_s_per_gpu"]
    assert 1 / (1 + outcome.step_sigma) < ratio < 1 + outcome.step_sigma
