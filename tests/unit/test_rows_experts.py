"""From a published row with experts to a scenario."""

from __future__ import annotations

import json

from tests.unit.test_rows import document, reason

EXPERTS = {
    "source": "SimuMax (Megatron-LM)", "model_name": "Mixtral 8x7b", "gpu": "H100", "num_gpus": "8", "dp": "4", "tp": "2",
    "layers": "", "hidden": "", "ffn_hidden": "", "heads": "", "kv_heads": "", "vocab": "", "seq_len": "4096",
    "mlp_type": "", "micro_batch": "1", "global_batch": "4", "precision": "bf16", "fsdp_or_zero": "zero1",
    "notes": "EP8; recompute modules=moe_act+layernorm",
}  # fmt: skip


def test_experts_come_with_the_name_and_their_ranks_with_the_notes() -> None:
    """Eight ranks for experts do not go evenly into 4 x 2 with two per expert, so that one holds an expert."""
    scenario = document(**EXPERTS)
    assert scenario["model"]["preset"] == "mixtral-8x7b" and scenario["model"]["implementation"] == "megatron"
    assert scenario["parallel"]["expert"] == {"degree": 8, "tensor": 1}
    assert scenario["parallel"]["tensor"] == {"degree": 2, "sequence_parallel": True}
    assert scenario["checkpoint"]["discard"] == ["norm", "activation"]


def test_experts_of_an_argument_list() -> None:
    arguments = {
        "moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True, "moe-router-topk": 8,
        "moe-layer-freq": "([0]*3+[1]*11)", "moe-shared-expert-intermediate-size": 2048, "kv-lora-rank": 512,
        "q-lora-rank": 1536, "moe-permute-fusion": True, "moe-router-dtype": "fp32",
    }  # fmt: skip
    printed = {"experts": "64", "moe_topk": "8", "moe_ffn_hidden": "2048", "ep": "8", "etp": "1", "mla": "yes"}
    scenario = document(**EXPERTS | printed | {"args_json": json.dumps(arguments)})
    experts = scenario["model"]["experts"]
    assert (experts["count"], experts["top_k"], experts["ffn_hidden"], experts["dense_layers"]) == (64, 8, 2048, 3)
    assert experts["selection_bias"] and experts["shared_ffn_hidden"] == 2048
    assert scenario["model"]["latent"]["q_rank"] == 1536


def test_experts_that_nobody_describes_are_said() -> None:
    assert "the experts' number and shape are not printed" in reason(model_name="DeepSeekV4 Flash")
