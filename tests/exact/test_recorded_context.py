"""torch's context_parallel, recorded: every allocation at its address, every free, every mark.

Real runs of torch 2.14.1 over a fake driver and a fake process group: a Llama under FSDP2 over data x context ranks, rank
cp - 1, tokens, targets and rope cache as the context's buffers. `rotate`: all-gather, or all-to-all (a ring).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "context").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recorded_step_of_context_parallel_ranks_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_cover_both_ways_to_pass_keys_and_values() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {(meta["rotate"], meta["cp"]) for meta in metas} >= {("all-gather", 2), ("all-gather", 4), ("all-to-all", 4)}
    assert {meta["ac"] for meta in metas} == {"none", "full", "op"}
