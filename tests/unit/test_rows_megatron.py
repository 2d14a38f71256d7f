"""Rows of Megatron's forks: what vTrain's program made, what BLOOM's scripts set."""

from __future__ import annotations

import pytest

from sim.checks.facts import facts_of
from sim.checks.rows import plan_of
from tests.unit.published_rows import document


def test_a_row_of_vtrain_is_read_by_its_own_columns() -> None:
    facts = facts_of({
        "# GPUs": "2", "global batch": "16", "micro batch": "8", "hidden size": "1024", "attention heads": "16",
        "# layers": "24", "sequence length": "1024", "tensor parallelism": "1", "data parallelism": "2",
        "pipeline parallelism": "1", "iteration time (ms)": "372.16",
    })  # fmt: skip
    assert (facts.num_gpus, facts.layers, facts.dp) == (2, 24, 2)
    assert facts.step_time_s == pytest.approx(0.37216)
    plan = plan_of(facts)
    assert plan.software.name == "vTrain's model of Megatron-DeepSpeed"
    assert (plan.document["model"]["vocab"], plan.document["checkpoint"]) == (50257, None)
    assert plan.document["precision"]["reduce"] == "fp16"


@pytest.mark.parametrize(("precision", "keeps"), [("bf16 (BF16_Optimizer)", True), ("fp16", None)])
def test_blooms_runs_wait_for_launches_and_keep_gradients_in_bf16(precision: str, keeps: bool | None) -> None:
    bloom = {
        "source": "BigScience BLOOM 176B prequel (Megatron-DeepSpeed)",
        "mlp_type": "gelu",
        "fsdp_or_zero": "zero1",
    }
    found = document(**bloom, precision=precision)
    assert found["host"] == {"framework": "megatron-deepspeed", "launch_blocking": True}
    assert found["parallel"]["data"].get("keep_gradients") is keeps


def test_vtrains_ranks_share_a_vocabulary_without_padding() -> None:
    changes = {"source": "vTrain", "mlp_type": "gelu", "vocab": "50257", "tp": "4", "num_gpus": "4", "dp": "1"}
    assert document(**changes, fsdp_or_zero="none")["model"]["vocab"] == 4 * 12564
