"""Sharding families beside FSDP2, recorded: every allocation at its address, every free, every mark, every collective.

Real runs of torch 2.14.1 over a fake driver and torch's "fake" process group. Not shipped but equal too: 17 more of DDP
(fp32, bf16, autocast; 2 and 4 ranks; with and without checkpoints, views, accumulation, no_sync; buckets of 1 MiB) and 43
of FSDP1 (all strategies, both forms of parameters, 2, 6 and 8 ranks, all prefetches, limiter on and off, every precision,
accumulation, no_sync, checkpoints inside and outside, reentrant or not). The GPU of a recording keeps up with the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.program.program import Program, Row
from sim.runtime.train import record_training
from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file, setup_of

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "families").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]
KINDS = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}
OUTSIDE = ("broadcast",)
"""Collectives that the recorder does not see."""


def collectives(program: Program) -> list[tuple[str, int]]:
    """Kind and bytes of every collective, in order of issue."""
    issued = [program.collectives[n] for n in program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()]
    return [(c.kind, c.bytes) for c in issued if c.kind not in OUTSIDE]


def recorded_collectives(data: dict[str, Any]) -> list[tuple[str, int]]:
    return [(KINDS.get(c["op"], c["op"]), c["in_bytes"]) for c in data["collectives"]]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recorded_family_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_collectives_come_in_the_recorded_order_and_size(path: Path) -> None:
    data = load(path)
    program = record_training(setup_of(data["meta"]), data["meta"]["steps"])
    assert collectives(program) == recorded_collectives(data)


def test_recordings_cover_the_families() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {meta["family"] for meta in metas} == {"ddp", "fsdp1"}
