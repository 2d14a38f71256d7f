"""Frozen weights and adapters, recorded: every allocation at its address, every free, every mark.

Real runs of torch 2.14.1 over a fake driver: torchtune's LoRALinear in the Llama of the FSDP2 recordings (`lora_*`), frozen
halves and products, and peft 0.21.2 on transformers 5.24 (`peft_*`), with bitsandbytes 0.50.2 (`qlora_*`). Not shipped
but equal too: 61 more of these kinds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "adapters").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recording_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_cover_the_ways_to_train_few_parameters() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {meta.get("implementation", "torchtitan") for meta in metas} == {"torchtitan", "transformers"}
    assert {meta["prec"] for meta in metas} >= {"bf16", "mp", "autocast"}
    assert any(meta.get("frozen") for meta in metas) and any(meta.get("world") for meta in metas)
    adapters = [meta["lora"] for meta in metas if "lora" in meta]
    assert {lora.get("double_quantization") for lora in adapters if lora.get("base")} == {True, False}
    assert any(lora.get("dropout") for lora in adapters) and any("head" in lora["targets"] for lora in adapters)
