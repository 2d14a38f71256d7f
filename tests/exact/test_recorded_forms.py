"""Forms of checkpointing, and training around it, recorded: every allocation at its address, every free, every mark.

Real runs of torch 2.14.1 (and transformers 5.24, megatron-core 0.16.1) over a fake driver. Not shipped but equal too: 190
more of the same kinds (GPT, Llama, transformers, Megatron; fp32, bf16, autocast, FSDP2; with and without dropout).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "forms").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recorded_form_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_cover_the_forms() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    forms = {field for meta in metas for field, value in meta.get("form", {}).items() if value}
    assert forms >= {"nested", "sequential", "layers", "inside", "discard", "reentrant"}
    assert {meta.get("mode", "train") for meta in metas} == {"train", "no_grad"}
    assert {meta.get("optimizer", "adamw") for meta in metas} == {"adamw", "sgd"}
    assert any(meta.get("in_backward") for meta in metas) and any(meta.get("chunks") for meta in metas)
