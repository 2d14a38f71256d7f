"""From a published row to a scenario: whose layers, which losses and stages, what an argument list adds, which FLOPs."""

from __future__ import annotations

import json

import pytest

from sim.checks import measured
from sim.checks.facts import facts_of
from sim.checks.rows import plan_of
from sim.model.config import ModelConfig
from sim.scenario import load_text
from tests.unit.published_rows import TITAN, row
from tests.unit.test_rows import assumed, document, reason

GOLDEN = TITAN | {
    "source": "Megatron-LM functional-test golden values", "model_name": "gpt:gpt3_mcore_te_tp1_pp4", "vocab": "",
    "ffn_hidden": "", "attention": "", "fsdp_or_zero": "none", "platform": "dgx_h100",
}  # fmt: skip


def test_what_an_argument_list_leaves_open_is_as_megatron_has_it() -> None:
    """Vocabulary of GPT-2's words, a gated MLP of 8/3 hidden in 64s, attention as Transformer Engine picks it, a tied head."""
    model = document(GOLDEN, args_json='{"transformer-impl": "transformer_engine", "swiglu": true}')["model"]
    assert (model["vocab"], model["ffn_hidden"], model["tied_embeddings"]) == (51200, 640, True)
    assert model["attention"] == "sdpa" and "loss_fusion" not in model
    given = '{"cross-entropy-loss-fusion": true, "untie-embeddings-and-output-weights": true}'
    model = document(GOLDEN | {"mlp_type": "gelu"}, args_json=given)["model"]
    assert (model["loss_fusion"], model["tied_embeddings"]) == ("native", False) and "attention" not in model
    older = document(GOLDEN | {"mlp_type": "gelu", "platform": "dgxa100_dracooci"}, args_json=given)["model"]
    assert "attention" not in older


def test_the_first_and_last_stage_have_as_many_layers_as_the_arguments_say() -> None:
    given = '{"decoder-first-pipeline-num-layers": 2, "decoder-last-pipeline-num-layers": 2}'
    shape = {"layers": "12", "pp": "4", "dp": "2"}
    assert document(GOLDEN | shape, args_json=given)["parallel"]["pipeline"]["placement"] == [2, 4, 4, 2]
    assert "placement" not in document(GOLDEN | shape, args_json="{}")["parallel"]["pipeline"]


def test_ranks_that_split_transformers_layers_are_torchtitans() -> None:
    split = document(source="NeMo AutoModel performance", tp="2", dp="4")
    assert split["model"]["implementation"] == "torchtitan" and split["parallel"]["tensor"]["degree"] == 2
    assert document(source="NeMo AutoModel performance")["model"]["implementation"] == "transformers"


def test_tflops_that_halve_attention_count_recomputation() -> None:
    facts = facts_of(row(source="stas00", recompute="full", tokens_per_s_per_gpu="", tflops_per_gpu="100"))
    model = load_text(json.dumps(plan_of(facts).document), "row").strategies[0].model
    assert isinstance(model, ModelConfig)
    matrices = 2 * (4 * 256 * 256 * 3 // 4 + 3 * 256 * 512) + 1024 * 256  # of two layers, and the head
    attention = 2 * 4 * 64 * 256
    per_token = 6 * (matrices + 256 * (2 * 2 + 1)) + 6 * attention  # norms have a weight per entry
    assert measured.step_s(facts, 1000, model) == pytest.approx(per_token * 4 / 3 * 1000 / (8 * 100e12), rel=1e-12)


def test_recipes_of_nemo_and_its_successor_fuse_the_loss() -> None:
    assert document(source="NeMo 24.09 performance")["model"]["loss_fusion"] == "native"
    assert document(source="Megatron-Bridge performance summary")["model"]["loss_fusion"] == "te"


def test_heads_that_are_not_printed_are_near_128_wide_and_go_evenly_over_the_ranks() -> None:
    facts = {"model_name": "GPT 187B", "mlp_type": "gelu", "source": "BigScience", "fsdp_or_zero": "zero1", "heads": ""}
    shape = {"hidden": "13824", "ffn_hidden": "", "kv_heads": "", "tp": "8", "dp": "1", "num_gpus": "8"}
    assert document(**facts, **shape)["model"]["heads"] == 96  # 144 wide; 128 of 108 and 72 of 192 are further off
    assert document(**facts, **shape | {"hidden": "4096"})["model"]["heads"] == 32
    assert "heads is not printed" in reason(**facts, **shape | {"hidden": "13"})
    assert "is no plain number" in reason(**facts | {"heads": "some"}, **shape)


def test_what_llmq_streams_from_main_memory_is_left_out_and_said() -> None:
    facts = {"source": "LLMQ benchmarks", "fsdp_or_zero": "none", "dp": "1", "num_gpus": "1", "global_batch": "2"}
    assert "main memory" in assumed(**facts, offload="offload-opt-m+offload-master")
    assert "main memory" not in assumed(**facts, offload="none")
    assert "offload of states" in reason(offload="optimizer", source="Megatron-LM")


def test_torchtunes_recipe_for_a_whole_model_on_one_gpu_steps_in_backward_with_8_bit_states() -> None:
    torchtune = {
        "source": "torchtune README",
        "model_name": "Llama 3.1 8B",
        "num_gpus": "1",
        "dp": "1",
        "global_batch": "2",
    }
    alone = document(**torchtune, notes="finetune method=full")["optimizer"]
    assert (alone["name"], alone["in_backward"], alone["clip_norm"]) == ("adamw-8bit", True, None)
    assert "in_backward" not in document(**torchtune, notes="finetune method=LoRA")["optimizer"]
    assert "in_backward" not in document(source="torchtune README", notes="finetune method=full")["optimizer"]
