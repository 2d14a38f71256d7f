"""Published rows over pipeline stages: schedules, stages per rank, micro-batches."""

from __future__ import annotations

import pytest

from sim.checks import features
from tests.unit.published_rows import document


@pytest.mark.parametrize(
    ("source", "micro_batch", "accumulation"),
    [("torchtitan benchmarks (Dec 2024)", 4, 8), ("torchtitan async TP (Jun 2025)", 1, 32), ("Megatron-LM", 1, 32)],
)
def test_torchtitan_of_2024_makes_as_many_micro_batches_as_pipeline_ranks(
    source: str, micro_batch: int, accumulation: int
) -> None:
    stages = document(source=source, pp="8", dp="1", micro_batch="", global_batch="32", fsdp_or_zero="fsdp2")
    assert stages["batch"] == {"micro_batch": micro_batch, "seq_len": 256, "accumulation": accumulation}


def test_a_row_that_says_interleaved_is() -> None:
    said = document(pp="2", dp="4", vpp="interleaved (number of stages/rank not given)", micro_batch="2")["parallel"]
    assert said["pipeline"] == {"degree": 2, "schedule": "interleaved"}


@pytest.mark.parametrize(
    ("changes", "schedule", "virtual"),
    [
        ({}, "1f1b", None),
        ({"vpp": "2"}, "interleaved", 2),
        ({"notes": "schedule=1F1B; microbatches=24"}, "1f1b", None),
        ({"notes": "schedule=1F1B-I; zb", "vpp": "max (each layer)", "layers": "7"}, "interleaved", 4),
        ({"notes": "schedule=ZB-1p; x"}, "zb-h1", None),
        ({"notes": "schedule=ZB-2p; x"}, "zb-h2", None),
        ({"notes": "schedule=ZB-V"}, "zb-v", None),
    ],
)
def test_schedules_by_the_notes(
    changes: dict[str, str], schedule: str, virtual: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "expressible", lambda path: True)
    section = document(pp="2", dp="4", **changes)["parallel"]["pipeline"]
    assert (section["schedule"], section.get("virtual")) == (schedule, virtual)


def test_deepspeeds_engine_lets_the_host_run_ahead_of_what_stages_exchange() -> None:
    shape = {"layers": "4", "pp": "2", "dp": "4", "mlp_type": "gelu", "fsdp_or_zero": "zero1"}
    assert document(source="BigScience", **shape)["parallel"]["pipeline"]["p2p_sync"] is False
    assert "p2p_sync" not in document(source="Megatron-LM", **shape)["parallel"]["pipeline"]
