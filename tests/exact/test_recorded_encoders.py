"""Training steps of transformers' BERT, ViT and T5, recorded: every allocation at its address, every free, every mark.

Real runs of transformers 5.24 on torch 2.14.1 over a fake driver, without an attention mask, as `model(ids, labels=...)`
calls them. ViT's patch convolution in fp32 ran cuDNN's code over a library that does nothing and asks for no workspace;
in 16 bit, where that code cannot run, it was stood in for by one that allocates the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "encoders").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recording_of_an_encoder_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_cover_each_family_with_both_kinds_of_attention() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    kinds = {(meta["arch"], meta["attention"]) for meta in metas}
    assert kinds >= {(arch, kind) for arch in ("bert", "vit", "t5") for kind in ("sdpa", "unfused")}
    assert {meta["prec"] for meta in metas} >= {"bf16", "fp32", "autocast", "mp"}
    assert {bool(meta["ckpt"]) for meta in metas} == {True, False}
