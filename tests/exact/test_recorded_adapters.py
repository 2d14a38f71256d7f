"""Frozen weights and adapters, recorded: every allocation at its address, every free, every mark.

Real runs of torch 2.14.1 over a fake driver: torchtune's LoRALinear in the Llama of the FSDP2 recordings (`lora_*`), frozen
halves and products, and peft 0.21.2 on transformers 5.24 (`peft_*`), with bitsandbytes 0.50.2 (`qlora_*`). Not shipped
but equal too: 61 more of these kinds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file, recorded_run, simulated_run

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "adapters").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recording_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


@pytest.mark.parametrize("name", ["qlora_fsdp8", "qlora_fsdp8_dq"])
def test_four_bit_weights_under_fsdp2_hold_what_was_recorded(name: str) -> None:
    """Made whole on the GPU, then split: from the first step on what is allocated, active and asked for, now and at most, in
    every phase. (Addresses are others', since there the whole model came first.)"""
    data = load(Path(__file__).parent / "recordings" / "sharded_adapters" / f"{name}.json.gz")
    simulated, recorded = simulated_run(data).marks, recorded_run(data).marks
    phases = [phase for phase in recorded if phase != "init"]
    assert len(phases) == 2 * 5
    for phase in phases:
        for statistic in ("allocated", "active", "requested"):
            assert simulated[phase][statistic] == recorded[phase][statistic], (phase, statistic)


def test_recordings_cover_the_ways_to_train_few_parameters() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {meta.get("implementation", "torchtitan") for meta in metas} == {"torchtitan", "transformers"}
    assert {meta["prec"] for meta in metas} >= {"bf16", "mp", "autocast"}
    assert any(meta.get("frozen") for meta in metas) and any(meta.get("world") for meta in metas)
    adapters = [meta["lora"] for meta in metas if "lora" in meta]
    assert {lora.get("double_quantization") for lora in adapters if lora.get("base")} == {True, False}
    assert any(lora.get("dropout") for lora in adapters) and any("head" in lora["targets"] for lora in adapters)
