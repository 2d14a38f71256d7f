"""From a published row to a scenario: the general rules, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from sim.checks import features
from sim.checks.facts import whole
from sim.checks.scoring import score_row
from tests.unit.published_rows import MPT, assumed, document, reason, row


def test_shapes_are_those_of_the_row() -> None:
    model = document()["model"]
    assert (model["layers"], model["hidden"], model["ffn_hidden"], model["vocab"]) == (2, 256, 512, 1024)
    assert (model["heads"], model["kv_heads"], model["implementation"]) == (4, 2, "torchtitan")


def test_a_known_name_brings_what_its_code_has() -> None:
    model = document(model_name="Qwen2.5-7B", layers="", hidden="", ffn_hidden="", heads="", kv_heads="", vocab="")[
        "model"
    ]
    assert model["preset"] == "qwen2.5-7b" and "hidden" not in model
    assert document(model_name="Llama 3.1 8B")["model"]["preset"] == "llama-3.1-8b"
    assert document(model_name="no such name")["model"]["preset"] == "llama-2-7b"


def test_bert_is_told_by_its_name() -> None:
    golden = {
        "source": "Megatron-LM functional-test golden values",
        "model_name": "bert:bert_mcore_tp2",
        "mlp_type": "",
    }
    golden |= {"tp": "2", "dp": "4", "fsdp_or_zero": "none", "kv_heads": "", "vocab": "", "attention": "standard"}
    model = document(**golden)["model"]
    assert (model["preset"], model["implementation"], model["max_positions"]) == ("bert-large", "megatron", 256)
    assert model["vocab"] == 30720  # 30,522 in multiples of 128 x tp
    assert "no decoder" in reason(**golden | {"model_name": "vit:vit_mcore_tp2"})


def test_t5_has_two_stacks_and_two_lengths() -> None:
    golden = {
        "source": "Megatron-LM functional-test golden values",
        "model_name": "t5:t5_mcore_tp2",
        "mlp_type": "gelu",
    }
    golden |= {"tp": "2", "dp": "4", "fsdp_or_zero": "none", "kv_heads": "", "vocab": "", "layers": "enc 12 + dec 6"}
    model = document(**golden | {"seq_len": "512/128"})["model"]
    assert (model["layers"], model["decoder_layers"], model["implementation"]) == (12, 6, "megatron")
    assert (model["vocab"], model["head_dim"], model["max_positions"]) == (30720, 64, 512)
    assert document(**golden | {"seq_len": "512/128"})["batch"]["target_len"] == 128
    assert "decoder's tokens" in reason(**golden | {"seq_len": "512"})


def test_blanks_take_stated_defaults_and_say_so() -> None:
    text = assumed(vocab="", ffn_hidden="", precision="", recompute="", global_batch="", fsdp_or_zero="")
    for word in (
        "vocabulary 32000",
        "ffn_hidden 768",
        "bf16 with fp32",
        "none assumed",
        "no gradient",
        "sharding fsdp2",
    ):
        assert word in text


def test_accumulation_follows_from_the_global_batch() -> None:
    assert document()["batch"] == {"micro_batch": 2, "seq_len": 256, "accumulation": 2}
    assert document(micro_batch="")["batch"] == {"micro_batch": 1, "seq_len": 256, "accumulation": 4}
    assert document(notes="step time = per ITERATION (micro-batch)")["batch"]["accumulation"] == 1
    assert "no multiple of micro_batch 3 x dp 8" in reason(micro_batch="3")
    assert "no multiple of micro_batch 1 x dp 8" in reason(micro_batch="", global_batch="12")


@pytest.mark.parametrize(
    ("label", "section"),
    [
        ("none", None),
        ("full", {"every": 1}),
        ("selective 1/3", {"every": 3}),
        ("every 2", {"every": 2}),
        ("selective_op (SAC)", {"every": 1, "save": ["attention", "every_second_matmul"]}),
    ],
)
def test_labels_of_recomputation(label: str, section: dict[str, Any] | None) -> None:
    assert document(recompute=label)["checkpoint"] == section


def test_megatron_recomputes_by_a_backward_within_the_backward() -> None:
    section = document(recompute="full", source="Megatron-LM", num_gpus="1", dp="1", fsdp_or_zero="none")["checkpoint"]
    assert section == {"every": 1, "reentrant": True}


def test_megatron_recomputes_core_attention_alike() -> None:
    row = {"source": "Megatron-LM", "num_gpus": "1", "dp": "1", "fsdp_or_zero": "none", "mlp_type": "gelu"}
    section = document(**row, recompute="selective_attention")["checkpoint"]
    assert section == {"every": 1, "inside": ["core_attention"], "reentrant": True}


def test_old_torch_recomputes_to_the_end() -> None:
    assert document(MPT)["checkpoint"] == {"every": 1, "early_stop": False}


def test_dtypes() -> None:
    assert document()["precision"] == {"parameters": "fp32", "compute": "bf16", "reduce": "fp32"}
    assert document(precision="bf16-true")["precision"]["parameters"] == "bf16"
    assert document(MPT, notes="MP mode=PURE")["precision"]["reduce"] == "bf16"
    assert document(precision="fp32")["precision"]["compute"] == "fp32"


def test_the_attention_kernel_is_that_of_the_software_of_its_time() -> None:
    assert document(MPT)["attention_kernel"] == "triton"
    assert document()["attention_kernel"] == "flash2"
    assert document(attention="flash (cuDNN)", gpu="B200")["attention_kernel"] == "cudnn"
    assert document(attention="flash (cuDNN)")["attention_kernel"] == "flash3"
    assert "attention_kernel" not in document(attention="flash (cuDNN)", gpu="A100")
    assert "attention_kernel" not in document(attention="")


def test_compiled_rows_are_scored_with_the_assumption_said() -> None:
    assert "compiled block by block" in assumed(compile="yes")
    assert document(compile="yes")["compile"] == {}
    assert document(compile="yes")["model"]["norm"] == "manual"
    assert "compile" not in document()


def test_compiled_rows_with_offload_are_played_in_eager_mode() -> None:
    offloaded = document(compile="yes", offload="activations")
    assert "compile" not in offloaded
    assert offloaded["model"]["norm"] == "fused"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": "2", "dp": "4"}, "tensor parallelism: scenarios have no parallel.tensor"),
        ({"pp": "2", "dp": "4"}, "pipeline parallelism: scenarios have no parallel.pipeline"),
        ({"cp": "2", "dp": "4"}, "context parallelism"),
        ({"cp": "Ulysses SP=8", "dp": "1"}, "context parallelism"),
        ({"fsdp_or_zero": "zero1 (distributed optimizer)", "source": "Megatron-LM"}, "ZeRO-1"),
        ({"fsdp_or_zero": "zero2", "source": "Megatron-LM"}, "ZeRO-2"),
        ({"fsdp_or_zero": "zero2-style (text)", "source": "Megatron-LM"}, "distributed optimizer"),
        ({"model_name": "Nemotron V3 Nano"}, "no decoder"),
        ({"fsdp_or_zero": "none", "source": "Megatron-LM"}, "replicated data parallelism"),
        ({"precision": "float8 rowwise"}, "8-bit"),
        ({"offload": "optimizer"}, "offload of states"),
        ({"offload": "activations ratio 0.40"}, "offload of activations"),
        ({"model_name": "Qwen3-30B-A3B"}, "experts"),
        ({"model_name": "ViT 24L"}, "no decoder"),
        ({"model_name": "Llama 8B LoRA"}, "adapters"),
        ({"notes": "paged 8-bit Adam"}, "an optimizer that is not modelled"),
        ({"notes": "SGD"}, "SGD or AdamW in 8 bit"),
        ({"notes": "finetune_adapter_v2"}, "LLaMA-Adapter"),
        ({"recompute": "partial: memory budget 0.5"}, "by a memory budget"),
        ({"layers": "twelve"}, "layers twelve is no plain number"),
        ({"seq_len": "<=4096"}, "seq_len <=4096 is no plain number"),
        ({"notes": "SINGLE TRANSFORMER LAYER of 22B"}, "the time is of one layer"),
        ({"tp": "1 (2)"}, "tp 1 (2) is no plain number"),
        ({"dp": "3"}, "dp 3 x tp 1 x pp 1 x cp 1 is not 8 GPUs"),
        ({"micro_batch": "", "global_batch": ""}, "neither micro_batch nor global_batch"),
    ],
)  # fmt: skip
def test_what_a_scenario_cannot_say_is_named(
    changes: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "expressible", lambda path: False)
    assert words in reason(**changes)


def test_all_reasons_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "expressible", lambda path: False)
    text = reason(precision="fp8", model_name="Mixtral", gpu="Gaudi 3")
    assert text.count(";") == 3


def test_a_row_becomes_expressible_with_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "expressible", lambda path: True)
    section = document(pp="2", tp="2", dp="2", vpp="3", sp="yes", micro_batch="2")["parallel"]
    assert section["pipeline"] == {"degree": 2, "schedule": "interleaved", "virtual": 3}
    assert section["tensor"] == {"degree": 2, "sequence_parallel": True}
    assert section["fsdp"] == {"degree": 2}


def test_data_parallelism_and_offload_of_activations_have_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "expressible", lambda path: True)
    megatron = {"source": "Megatron-LM"}
    zero = document(fsdp_or_zero="zero1 (distributed optimizer)", offload="activations ratio 0.40", **megatron)
    assert zero["parallel"] == {"data": {"degree": 8, "distributed_optimizer": True}}
    assert zero["offload"] == {"what": "activations", "layers": "ratio 0.4"}
    assert document(fsdp_or_zero="none", **megatron)["parallel"] == {"data": {"degree": 8}}
    assert document(offload="boundary activations")["offload"] == {"what": "checkpoint_inputs"}
    assert document(recompute="selective_attention")["checkpoint"] == {"every": 1, "inside": ["core_attention"]}
    kwai = document(recompute="selective_op (MLP activation func + norm)")
    assert kwai["checkpoint"] == {"every": 1, "discard": ["norm", "activation"]}


def test_megatron_on_one_gpu_has_main_parameters_in_fp32() -> None:
    changes = {"source": "Megatron-LM", "mlp_type": "gelu", "num_gpus": "1", "dp": "1", "fsdp_or_zero": "none"}
    assert document(**changes)["parallel"] == {"data": {"degree": 1}}


def test_where_recomputation_is_doubtful_both_times_are_reported() -> None:
    scores = {
        label: score_row(row(recompute=label)) for label in ("full", "none", "full (doubtful)", "none (doubtful)")
    }
    for label, other, how in (("full", "none", "without"), ("none", "full", "with full")):
        doubtful = scores[f"{label} (doubtful)"]
        assert doubtful.figures == scores[label].figures
        assert doubtful.reason.startswith(f"{how} recomputation {scores[other].figures['predicted_step_time_s']:.6g} s")


def test_a_blank_micro_batch_is_the_largest_that_fits() -> None:
    assert "micro-batch 4, the largest" in score_row(row(micro_batch="")).reason
    long = row(micro_batch="", global_batch="64", seq_len="131072", gpu="RTX 4090")
    assert "micro-batch 4, the largest" in score_row(long | {"layers": "1", "precision": "bf16-true"}).reason


def test_a_section_that_the_schema_spells_otherwise_is_not_expressible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "expressible", lambda path: True)
    score = score_row(
        row(offload="optimizer", fsdp_or_zero="none", num_gpus="1", dp="1", recompute="selective_attention")
    )
    assert score.status == "not expressible" and score.reason


def test_the_schema_is_asked_by_path() -> None:
    assert features.expressible("parallel.fsdp.degree")
    assert features.expressible("checkpoint")
    assert not features.expressible("parallel.no_such_thing")
    assert not features.expressible("torch.version")


def test_whole_numbers_only() -> None:
    assert [whole(text) for text in ("8", " 8.0", "0", "", "8x", "-1", "1e3")] == [8, 8, None, None, None, None, None]
