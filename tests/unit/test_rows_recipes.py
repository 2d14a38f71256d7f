"""Published rows whose tables leave to their recipes what is recomputed, fused or cut into stages."""

from __future__ import annotations

import pytest

from tests.unit.published_rows import document

OSS = {
    "source": "Megatron-Bridge performance summary", "model_name": "GPT OSS 120B", "layers": "", "hidden": "", "heads": "",
    "kv_heads": "", "ffn_hidden": "", "vocab": "", "seq_len": "4096", "num_gpus": "64", "dp": "64", "micro_batch": "4",
    "global_batch": "1280", "fsdp_or_zero": "zero1 (distributed optimizer)", "recompute": "", "vpp": "n/a",
    "notes": "EP=64",
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "again"),
    [("DGX-GB200", True), ("DGX-B200", True), ("DGX-H100", True), ("DGX-GB300", False), ("DGX-B300", False)],
)
def test_gpt_oss_makes_norms_and_activations_again_where_its_recipe_says_so(gpu: str, again: bool) -> None:
    made = document(**OSS, gpu=gpu, precision="BF16")
    assert (made["checkpoint"] or {}).get("discard") == (["norm", "activation"] if again else None)
    assert "bias" not in made["model"]["experts"]  # the preset has them


def test_what_a_row_prints_goes_before_its_recipe() -> None:
    made = document(**OSS | {"recompute": "full"}, gpu="DGX-GB200", precision="BF16")
    assert made["checkpoint"]["every"] == 1 and "discard" not in made["checkpoint"]


def test_in_mxfp8_experts_are_fused() -> None:
    made = document(**OSS, gpu="DGX-GB200", precision="MXFP8")
    assert (made["model"]["experts"]["bias"], made["model"]["experts"]["clamped"]) == (False, False)


def test_nemotron_340b_has_a_stage_per_layer_where_its_row_prints_none() -> None:
    nemotron = {
        "source": "NVIDIA dgxc-benchmarking v25.04.02", "model_name": "Nemotron4 340b", "layers": "96", "hidden": "18432",
        "heads": "96", "kv_heads": "8", "ffn_hidden": "73728", "vocab": "256000", "mlp_type": "squared relu",
        "seq_len": "4096", "gpu": "H100", "num_gpus": "256", "tp": "8", "pp": "8", "dp": "4", "micro_batch": "1",
        "global_batch": "64", "precision": "bf16", "fsdp_or_zero": "zero1",
    }  # fmt: skip
    assert document(**nemotron, vpp="")["parallel"]["pipeline"]["virtual"] == 12
    assert document(**nemotron, vpp="6")["parallel"]["pipeline"]["virtual"] == 6
    assert "virtual" not in document(**nemotron | {"model_name": "Nemotron4 15b"}, vpp="")["parallel"]["pipeline"]


@pytest.mark.parametrize(
    ("model", "gpu", "release", "flex"),
    [
        ("Qwen3_30B_a3B", "DGX-B200", "line 347 (26.04 NeMo Container)", True),
        ("Qwen3_30B_a3B", "DGX-B200", "line 582 (25.11 NeMo Container)", False),
        ("Qwen3_235B_a22B", "DGX-GB300", "line 73 (26.08 NeMo Container)", True),
        ("Qwen3_235B_a22B", "DGX-H100", "line 357 (26.04 NeMo Container)", False),
        ("Kimi_K2", "DGX-GB300", "line 385 (26.04 NeMo Container)", True),
    ],
)
def test_hybrid_ep_carries_tokens_where_recipes_of_2026_say_so(model: str, gpu: str, release: str, flex: bool) -> None:
    made = document(**OSS | {"model_name": model, "source_locator": release}, gpu=gpu, precision="BF16")
    assert made["model"]["experts"].get("dispatcher") == ("flex" if flex else None)


@pytest.mark.parametrize(
    ("name", "source", "depth"),
    [
        ("DeepSeekV3", "Megatron-Bridge performance summary", 1),
        ("DeepSeekV3 (w/ MTP)", "Megatron-Bridge performance summary", 1),
        ("DeepSeekV3 (w/o MTP)", "Megatron-Bridge performance summary", None),
        ("Kimi_K2", "Megatron-Bridge performance summary", None),
        ("Deepseek V3", "NVIDIA dgxc-benchmarking v25.05.05", 1),
    ],
)
def test_deepseek_predicts_a_token_more_unless_its_row_says_without(name: str, source: str, depth: int | None) -> None:
    made = document(**OSS | {"model_name": name, "source": source}, gpu="DGX-GB200", precision="BF16")
    assert made["model"].get("mtp_layers") == depth


@pytest.mark.parametrize(("pp", "vpp", "last"), [("2", "8", 1), ("4", "4", 1), ("8", "4", 0), ("4", "n/a", 13)])
def test_deepseeks_last_stage_has_fewer_layers(pp: str, vpp: str, last: int) -> None:
    stages = OSS | {
        "model_name": "DeepSeekV3",
        "pp": pp,
        "vpp": vpp,
        "dp": "",
        "num_gpus": "256",
        "global_batch": "2048",
    }
    placement = document(**stages | {"micro_batch": "1"}, gpu="DGX-GB200", precision="BF16")["parallel"]["pipeline"][
        "placement"
    ]
    assert (sum(placement), placement[-1]) == (61, last)


def test_moonlights_moments_are_in_16_bit() -> None:
    moonlight = OSS | {"model_name": "Moonlight 16B-A3B", "num_gpus": "8", "tp": "2", "dp": "4", "notes": "EP8"}
    made = document(**moonlight | {"global_batch": "4", "micro_batch": "1"}, gpu="H100-80GB", precision="bf16")
    assert made["parallel"]["data"]["moments"] == "bf16"
    assert "moments" not in document(**OSS, gpu="DGX-H100", precision="BF16")["parallel"]["data"]
