"""DeepSpeed's ZeRO, recorded: stages 1 and 2 block by block, stage 3 by what is held and its peaks in every phase.

Real runs of DeepSpeed 0.19.8 on torch 2.14.1 over a fake driver and torch's "fake" process group; the recordings keep
large blocks only. Smaller ones (scalars of the overflow check and the norm) are not imitated, so addresses are not
compared. For stages 1 and 2 what is allocated, freed before it and summed comes in the recorded order. Stage 3 has a
linear layer of its own, which makes the weight's gradient last: there the sums and peaks of every phase are equal.
The recorder does not see the all-gathers. Initialization of stage 3 is left out: the script made the whole model first.
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


def large_blocks(program: Program, marks: bool = False) -> list[list[Any]]:
    """Events of large blocks; with `marks` the script's between them."""
    blocks, events = {}, []
    named: dict[int, list[str]] = {}
    for mark in program.marks if marks else ():
        named.setdefault(mark.memory_events, []).append(mark.name)
    columns = (program.mem_kind, program.mem_handle, program.mem_bytes, program.mem_stream)
    for number, (kind, handle, size, stream) in enumerate(zip(*(column.tolist() for column in columns))):
        events += [["@", name, 0] for name in named.get(number, ())]
        if kind == Mem.ALLOC:
            blocks[handle] = size, stream
        if kind != Mem.RECORD_STREAM and blocks[handle][0] >= LEAST_BYTES:
            events.append(["f" if kind == Mem.FREE else "a", *blocks[handle]])
    return events + [["@", name, 0] for name in named.get(len(program.mem_kind), ())]


BLOCKS = [run for run in RUNS if run["meta"]["stage"] < 3]
PEAKS = [run for run in RUNS if run["meta"]["stage"] == 3]


@pytest.mark.parametrize("run", BLOCKS, ids=[run["name"] for run in BLOCKS])
def test_large_blocks_and_collectives_are_those_of_deepspeed(run: dict[str, Any]) -> None:
    program = record_training(llama_setup(run["meta"]), run["meta"]["steps"])
    assert bursts(large_blocks(program)) == bursts(run["events"])
    issued = [program.collectives[n] for n in program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()]
    assert [["all_reduce", c.bytes] for c in issued if c.kind == "all_reduce"] == run["collectives"]


def phases(events: list[list[Any]]) -> dict[str, tuple[int, int]]:
    """By mark: bytes of large blocks that are held then, and the most that were since the mark before."""
    held, peak, result = 0, 0, {}
    for action, size, _ in events:
        if action == "@":
            result[str(size)] = held, peak
            peak = held
        else:
            held += size if action == "a" else -size
            peak = max(peak, held)
    return {name: sizes for name, sizes in result.items() if name != "init"}


@pytest.mark.parametrize("run", PEAKS, ids=[run["name"] for run in PEAKS])
def test_what_stage_3_holds_and_its_peaks_are_those_of_deepspeed(run: dict[str, Any]) -> None:
    program = record_training(llama_setup(run["meta"]), run["meta"]["steps"])
    recorded = phases(run["events"])
    simulated = phases(large_blocks(program, marks=True))
    assert {name: simulated[name] for name in recorded} == recorded


def test_recordings_cover_all_stages() -> None:
    assert {run["meta"]["stage"] for run in RUNS} == {1, 2, 3}
