"""Training steps of transformers' and Megatron's own code, recorded: every allocation at its address, every free, every mark.

The files hold real runs of transformers 5.24 and megatron-core 0.16.1 (fusions off but the masked softmax, whose kernel
was stood in for by one that allocates its result and overwrites the gradient) on torch 2.14.1 over a fake driver.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "implementations").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recording_of_an_implementation_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_of_implementations_cover_each_family_and_precision() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {meta["arch"] for meta in metas} >= {"llama", "qwen2", "qwen3", "gpt2", "megatron"}
    assert {meta["prec"] for meta in metas} >= {"bf16", "fp32", "autocast", "mp"}
    assert {bool(meta["ckpt"]) for meta in metas} == {True, False}
