"""Liger's kernels in transformers' Llama, recorded: every allocation at its address, every free, every mark.

Real runs of transformers 5.24 with liger-kernel 0.8.5 on torch 2.14.1 over a fake driver, where kernels do nothing. Not
shipped but equal too: the fused loss alone in bf16 and under FSDP2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "liger").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recording_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_cover_precisions_and_kernels() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {meta["prec"] for meta in metas} == {"bf16", "fp32", "autocast", "mp"}
    assert max(len(meta["liger"]) for meta in metas) == 4
