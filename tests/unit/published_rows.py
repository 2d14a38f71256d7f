"""Rows of published tables for the tests, made by hand: shapes that play in a fraction of a second."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from sim.checks.expressible import NotExpressible
from sim.checks.facts import COLUMNS, facts_of
from sim.checks.rows import plan_of

TITAN = {
    "source": "torchtitan benchmarks", "model_name": "A small Llama", "layers": "2", "hidden": "256", "ffn_hidden": "512",
    "heads": "4", "kv_heads": "2", "vocab": "1024", "seq_len": "256", "mlp_type": "swiglu", "attention": "flash (SDPA)",
    "gpu": "H100-80GB", "num_gpus": "8", "tp": "1", "pp": "1", "cp": "1", "dp": "8", "fsdp_or_zero": "fsdp2",
    "micro_batch": "2", "global_batch": "32", "precision": "bf16", "recompute": "none", "offload": "none",
    "compile": "no", "tokens_per_s_per_gpu": "100000", "peak_mem_gib": "0.5",
}  # fmt: skip
"""A row that scenarios can say."""

MPT = TITAN | {
    "source": "MosaicML llm-foundry MPT benchmarks", "model_name": "MPT-tiny", "kv_heads": "4", "mlp_type": "gelu",
    "attention": "flash", "gpu": "a100_40gb", "fsdp_or_zero": "fsdp1", "recompute": "full", "peak_mem_gib": "",
}  # fmt: skip


def row(base: dict[str, str] = TITAN, **changes: str) -> dict[str, str]:
    """A row with every column; those that `base` and `changes` leave out are blank."""
    return dict.fromkeys(COLUMNS, "") | base | changes


def document(base: dict[str, str] = TITAN, **changes: str) -> dict[str, Any]:
    """The scenario of a row."""
    return plan_of(facts_of(row(base, **changes))).document


def assumed(base: dict[str, str] = TITAN, **changes: str) -> str:
    """What its scenario assumes."""
    return "; ".join(plan_of(facts_of(row(base, **changes))).assumptions)


def reason(base: dict[str, str] = TITAN, **changes: str) -> str:
    """Why it has none."""
    with pytest.raises(NotExpressible) as caught:
        plan_of(facts_of(row(base, **changes)))
    return str(caught.value)


def write_table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
