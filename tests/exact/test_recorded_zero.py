"""DeepSpeed's ZeRO, recorded: every block of 32 KiB and more in order, with what was freed before it, every collective.

Real runs of DeepSpeed 0.19.8 on torch 2.14.1 over a fake driver and torch's "fake" process group; the recordings keep
large blocks only. Smaller ones (scalars of the overflow check and the norm) are not imitated, so addresses are not
compared. The all-gather after the step is one that the recorder does not see.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.program.program import Mem, Program, Row
from sim.runtime.train import record_training
from tests.exact.recorded_setup import llama_setup

LEAST_BYTES = 32 << 10
FILE = Path(__file__).parent / "recordings" / "zero.jsonl.gz"
RUNS: list[dict[str, Any]] = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).splitlines()]

Burst = tuple[list[tuple[int, int]], tuple[int, int] | None]
"""(bytes, stream) of what is freed before an allocation, and of the allocation (None at the end)."""


def bursts(events: list[list[Any]]) -> list[Burst]:
    """Streams are numbered as they appear."""
    streams: dict[int, int] = {}
    result: list[Burst] = []
    freed: list[tuple[int, int]] = []
    for action, size, stream in events:
        block = (size, streams.setdefault(stream, len(streams)))
        if action == "f":
            freed.append(block)
        else:
            result.append((sorted(freed), block))
            freed = []
    return [*result, (sorted(freed), None)]


def large_blocks(program: Program) -> list[list[Any]]:
    blocks, events = {}, []
    columns = (program.mem_kind, program.mem_handle, program.mem_bytes, program.mem_stream)
    for kind, handle, size, stream in zip(*(column.tolist() for column in columns)):
        if kind == Mem.ALLOC:
            blocks[handle] = size, stream
        if kind != Mem.RECORD_STREAM and blocks[handle][0] >= LEAST_BYTES:
            events.append(["f" if kind == Mem.FREE else "a", *blocks[handle]])
    return events


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_large_blocks_and_collectives_are_those_of_deepspeed(run: dict[str, Any]) -> None:
    program = record_training(llama_setup(run["meta"]), run["meta"]["steps"])
    assert bursts(large_blocks(program)) == bursts(run["events"])
    issued = [program.collectives[n] for n in program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()]
    assert [["all_reduce", c.bytes] for c in issued if c.kind == "all_reduce"] == run["collectives"]


def test_recordings_cover_both_stages() -> None:
    assert {run["meta"]["stage"] for run in RUNS} == {1, 2}
