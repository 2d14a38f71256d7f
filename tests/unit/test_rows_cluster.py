"""Published rows: which card, nodes and sharing of tokens a row's labels mean."""

from __future__ import annotations

import pytest

from tests.unit.test_rows import document, reason


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("a100_40gb", "a100-sxm-40gb"),
        ("A100-SXM4-80GB (Jean Zay, 8/node)", "a100-sxm-80gb"),
        ("H100 96GB HBM2e 2.4TB/s (500W limit, Grand Teton)", "h100-96gb-hbm2e"),
        ("H100 (95.04 GiB usable)", "h100-96gb-hbm2e"),
        ("H100-80GB SXM (DGX)", "h100-sxm-80gb"),
        ("DGX-GB200", "gb200-186gb"),
        ("B200-SXM (HBM 180GB class; 8-GPU node)", "b200-sxm-180gb"),
        ("RTX 4090", "rtx4090-24gb"),
    ],
)
def test_a_gpu_is_found_by_the_words_of_its_label(label: str, name: str) -> None:
    assert document(gpu=label)["cluster"]["gpu"] == name


def test_a_gpu_that_the_catalogue_lacks_is_named() -> None:
    assert reason(gpu="RTX 5060 Ti 8GB") == "GPU RTX 5060 Ti 8GB is not in the catalogue"
    assert reason(gpu="") == reason(gpu="GB300 (GPU not printed in the log)") == "gpu is not printed"


def test_nemo_shares_tokens_among_tensor_ranks_unless_a_row_says_otherwise() -> None:
    row = {"source": "NeMo performance summary", "tp": "2", "num_gpus": "4", "dp": "2", "precision": "bf16"}
    for said, shares in (("", True), ("yes", True), ("no", False)):
        assert document(**row, sp=said)["parallel"]["tensor"]["sequence_parallel"] is shares


def test_squared_relu_is_written_into_the_model() -> None:
    row = {
        "source": "NeMo performance summary",
        "mlp_type": "squared_relu",
        "precision": "bf16",
        "model_name": "Nemotron X",
    }
    model = document(**row, ffn_hidden="")["model"]
    assert (model["activation"], model["norm"], model["ffn_hidden"]) == ("squared_relu", "layer_norm", 4 * 256)


def test_products_run_at_the_rate_that_the_authors_measured_on_the_machine() -> None:
    simumax = {"source": "SimuMax v1.2 B200 release (real Megatron-LM runs)", "precision": "bf16"}
    assert document(**simumax, gpu="B200-SXM")["gemm_efficiency"] == 0.51
    assert "gemm_efficiency" not in document(**simumax, gpu="H100")
    assert "gemm_efficiency" not in document(gpu="B200-SXM")


def test_a_smaller_card_of_a_kind_has_its_own_memory() -> None:
    assert document(gpu="V100-SXM2-16GB")["cluster"]["usable_memory"] == "15.75 GiB"
    assert document(gpu="V100-SXM2-16GB")["precision"]["compute"] == "fp16"


def test_nodes_are_the_usual_ones_unless_the_notes_print_them() -> None:
    assert document(num_gpus="64", dp="64", global_batch="128")["cluster"] == {
        "gpu": "h100-sxm-80gb", "gpus_per_node": 8, "nodes": 8,
    }  # fmt: skip
    assert document(notes="2 nodes x 4 GPUs")["cluster"]["gpus_per_node"] == 4
    assert document(num_gpus="4", dp="4")["cluster"]["gpus_per_node"] == 4
