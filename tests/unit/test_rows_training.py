"""What a published row trains, and with which optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.published_rows import document


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({"model_name": "Llama3 8B LoRA r16 all *_proj"}, {"rank": 16, "targets": ["all"], "dtype": "bf16"}),
        ({"source": "NeMo summary", "notes": "task=LoRA"}, {"rank": 16, "targets": ["qkv"], "dtype": "bf16"}),
        ({"notes": "finetune_lora; trainable 4,194,304"}, {"rank": 8, "targets": ["q", "v"], "dtype": "bf16"}),
        (
            {"source": "torchtune README", "notes": "finetune method=LoRA"},
            {"rank": 8, "targets": ["q", "v", "o", "mlp"], "dtype": "bf16"},
        ),
        (
            {"notes": "finetune_lora", "precision": "bf16-true + bnb.nf4"},
            {"rank": 8, "targets": ["q", "v"], "dtype": "bf16", "base": "nf4", "double_quantization": False},
        ),
    ],
)
def test_adapters_of_a_row(changes: dict[str, str], section: dict[str, Any]) -> None:
    model = document(**changes)["model"]
    assert model["lora"] == section
    assert (model["implementation"] == "transformers") == ("base" in section)


def test_compiled_adapters_on_four_bits_are_played_in_eager_mode() -> None:
    assert "compile" in document(model_name="Llama 8B LoRA", compile="yes")
    assert "compile" not in document(model_name="Llama 8B QLoRA", compile="yes")


def test_optimizers_of_a_row() -> None:
    assert "name" not in document(notes="AdamW")["optimizer"]
    assert document(notes="bnb 8-bit")["optimizer"]["name"] == "adamw-8bit"
    lomo = document(notes="LOMO (fused update)")
    assert lomo["optimizer"] | {"variant": "", "zero_grad": ""} == {
        "name": "sgd", "in_backward": True, "clip_norm": None, "variant": "", "zero_grad": "",
    }  # fmt: skip
    assert lomo["precision"]["parameters"] == "bf16"


def test_torchtune_recomputes_and_chunks_its_loss_by_recipe() -> None:
    model = document(source="torchtune README", recompute="", num_gpus="1", dp="1", fsdp_or_zero="none")
    assert model["checkpoint"] == {"every": 1}
    assert model["model"]["loss_chunks"] == 8
