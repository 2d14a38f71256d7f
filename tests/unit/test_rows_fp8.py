"""Published rows in 8 bit, of newer cards and of Nemotron: which scenario they become."""

from __future__ import annotations

import pytest

from sim.checks import measured
from sim.checks.expressible import NotExpressible
from sim.checks.facts import facts_of
from sim.checks.rows import plan_of
from sim.model.catalogue import build_model, preset_shapes
from sim.model.flops import model_flops_per_token
from tests.unit.published_rows import TITAN, document, row

NEMO = {"source": "NeMo 24.07 performance summary", "precision": "fp8", "gpu": "H100-80GB SXM (DGX)", "num_gpus": "8"}
NEMO |= {"fsdp_or_zero": "zero1 (distributed optimizer)", "dp": "8", "micro_batch": "1", "global_batch": "64"}
BRIDGE = NEMO | {"source": "Megatron-Bridge performance summary", "gpu": "DGX-GB200"}


@pytest.mark.parametrize(
    ("source", "label", "recipe", "stored"),
    [
        (NEMO, "fp8", "delayed", True),
        (BRIDGE, "FP8", "tensorwise", True),
        (BRIDGE, "FP8-CS (FP8-MX)", "tensorwise", True),
        (BRIDGE, "MXFP8", "mxfp8", None),
        (NEMO, "bf16", None, None),
        (NEMO | {"source": "Megatron-LM golden values"}, "fp8(hybrid/tensorwise)+bf16", "tensorwise", None),
        (NEMO | {"source": "Megatron-LM golden values"}, "fp8 delayed", "delayed", None),
    ],
)
def test_fp8_is_transformer_engines(
    source: dict[str, str], label: str, recipe: str | None, stored: bool | None
) -> None:
    made = document(**source | {"precision": label})
    assert made["precision"].get("fp8") == recipe
    assert made["parallel"]["data"].get("fp8_parameters") == stored
    assert made["model"]["implementation"] == "megatron"


def test_megatrons_fsdp_gathers_in_8_bit() -> None:
    made = document(**BRIDGE | {"precision": "FP8", "fsdp_or_zero": "megatron-fsdp (8)"})
    assert made["parallel"]["fsdp"] == {"degree": 8, "float8_all_gather": True}
    assert made["precision"]["fp8"] == "tensorwise"


def test_4_bit_products_are_transformer_engines_too() -> None:
    made = document(**BRIDGE | {"precision": "NVFP4"})
    assert (made["precision"]["fp4"], "fp8" in made["precision"]) == ("nvfp4", False)
    assert "fp8_parameters" not in made["parallel"]["data"]
    with pytest.raises(NotExpressible, match="8-bit or 4-bit"):
        document(**BRIDGE | {"precision": "INT8"})


def test_what_is_saved_in_8_bit_is_not_made_again() -> None:
    plan = plan_of(facts_of(row(TITAN, **NEMO | {"recompute": "recompute-norm+recompute-swiglu"})))
    assert plan.document["checkpoint"] is None
    assert "saved in 8 bit" in "; ".join(plan.assumptions)
    bf16 = document(**NEMO | {"precision": "bf16", "recompute": "recompute-norm+recompute-swiglu"})
    assert bf16["checkpoint"]["discard"] == ["norm", "activation"]


def test_a_doubtful_dp_gives_way_to_the_other_degrees() -> None:
    doubt = "DP column printed 2 does not always equal GPUs/(TP*PP*CP)"
    assert document(**NEMO | {"dp": "2", "notes": doubt})["parallel"]["data"]["degree"] == 8
    with pytest.raises(NotExpressible, match="is not 8 GPUs"):
        document(**NEMO | {"dp": "2"})


def test_nemos_tflops_are_model_flops() -> None:
    facts = facts_of(row(TITAN, **NEMO | {"tflops_per_gpu": "500", "tokens_per_s_per_gpu": "", "step_time_s": ""}))
    model = build_model("llama-tiny", preset_shapes("llama-tiny"), "megatron")
    seconds = measured.step_s(facts, 4096, model)
    assert seconds == model_flops_per_token(model, facts.seq_len or 0) * 4096 / (8 * 500e12)
    assert measured.step_s(facts, 4096) is None


def test_stages_of_embedding_and_head_alone() -> None:
    shape = NEMO | {"layers": "6", "pp": "4", "vpp": "2", "dp": "2", "precision": "bf16"}
    assert document(**shape)["parallel"]["pipeline"]["placement"] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert "placement" not in document(**shape | {"layers": "8"})["parallel"]["pipeline"]


def test_squared_relu_is_nemotrons() -> None:
    model = document(**NEMO | {"model_name": "Nemotron4 15b", "mlp_type": "squared_relu"})["model"]
    assert (model["activation"], model["norm"], model["implementation"]) == ("squared_relu", "layer_norm", "megatron")


@pytest.mark.parametrize(
    ("label", "name", "per_node"),
    [
        ("DGX-GB300", "gb300-288gb", 8),
        ("DGX-B300", "b300-sxm-288gb", 8),
        ("RTX PRO 6000 96GB", "rtxpro6000-96gb", 8),
    ],
)
def test_newer_cards_are_known(label: str, name: str, per_node: int) -> None:
    cluster = document(**NEMO | {"gpu": label, "precision": "bf16"})["cluster"]
    assert (cluster["gpu"], cluster["gpus_per_node"]) == (name, per_node)


def test_of_two_runs_in_a_row_the_first_counts() -> None:
    """Megatron-Bridge's summary of 25.09 prints no precision, but a second run, of other granularity, in parentheses."""
    two = BRIDGE | {"precision": "", "num_gpus": "64", "tp": "1 (2)", "pp": "1 (4)", "vpp": "1 (5)", "dp": ""}
    two |= {"notes": 'EP=1; raw tok="3986 (3546)"', "fsdp_or_zero": "megatron-fsdp (64 (0))", "global_batch": "128"}
    made = document(**two)
    assert made["precision"]["fp8"] == "tensorwise"
    assert made["parallel"]["fsdp"]["degree"] == 64 and "pipeline" not in made["parallel"]
    with pytest.raises(NotExpressible, match="precision is not printed"):
        document(**two | {"notes": 'EP=1; raw tok="3986"', "tp": "1", "pp": "1", "vpp": ""})
