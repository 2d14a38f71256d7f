"""Sharding families beside FSDP2, recorded: every allocation at its address, every free, every mark, every collective.

Real runs of torch 2.14.1 over a fake driver and torch's "fake" process group. Not shipped but equal too: 17 more of DDP
(fp32, bf16, autocast; 2 and 4 ranks; with and without checkpoints, views, accumulation, no_sync; buckets of 1 MiB) and 43
of FSDP1 (all strategies, both forms of parameters, 2, 6 and 8 ranks, all prefetches, limiter on and off, every precision,
accumulation, no_sync, checkpoints inside and outside, reentrant or not). Four of static graphs and of chunked losses went over
a process group in Python that hands back what it is given. The GPU of a recording keeps up with the host.
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
BROADCAST = "broadcast"
"""Some recordings have them, some were made without."""


def collectives(program: Program, broadcasts: bool) -> list[tuple[str, int]]:
    """Kind and bytes of every collective, in order of issue."""
    issued = [program.collectives[n] for n in program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()]
    return [(c.kind, c.bytes) for c in issued if broadcasts or c.kind != BROADCAST]


def recorded_collectives(data: dict[str, Any]) -> list[tuple[str, int]]:
    return [(KINDS.get(c["op"], c["op"]), c["in_bytes"]) for c in data["collectives"]]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recorded_family_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_collectives_come_in_the_recorded_order_and_size(path: Path) -> None:
    data = load(path)
    program = record_training(setup_of(data["meta"]), data["meta"]["steps"])
    recorded = recorded_collectives(data)
    assert collectives(program, any(kind == BROADCAST for kind, _ in recorded)) == recorded


def test_recordings_cover_the_families() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {meta["family"] for meta in metas} == {"ddp", "fsdp1"}
