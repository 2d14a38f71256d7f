"""DeepSpeed's ZeRO-Offload, recorded: blocks on the device as test_recorded_zero.py compares them, and every copy.

Real runs of DeepSpeed 0.19.8 on torch 2.14.1 over a fake driver, which noted each copy between device and host. Copies of
scalars (norms, overflow flags, checks between ranks) are not imitated; those of stage 3 begin after initialization. With
stage 3 and checkpointing the copies of gathered parts are more here than in the recording, which keeps parameters from
a recomputation to the backward that follows: that run is held to its bytes alone.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.program.program import Program, Row
from sim.runtime.train import record_training
from tests.exact.recorded_setup import llama_setup
from tests.exact.test_recorded_zero import bursts, large_blocks, phases

LEAST_BYTES = 512
FILE = Path(__file__).parent / "recordings" / "zero_offload.jsonl.gz"
RUNS: list[dict[str, Any]] = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).splitlines()]
WAYS = {"device_to_host": "out", "host_to_device": "back"}


def copies(program: Program, first_row: int) -> list[list[Any]]:
    rows = program.row_argument[first_row:][program.row_kind[first_row:] == Row.COPY].tolist()
    issued = [program.copies[number] for number in rows]
    return [[WAYS[copy.direction], copy.bytes] for copy in issued if copy.bytes >= LEAST_BYTES]


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_blocks_on_the_device_and_copies_are_those_of_deepspeed(run: dict[str, Any]) -> None:
    program = record_training(llama_setup(run["meta"]), run["meta"]["steps"])
    first_row = 0
    if run["meta"]["stage"] < 3:
        assert bursts(large_blocks(program)) == bursts(run["events"])
    else:
        recorded, simulated = phases(run["events"]), phases(large_blocks(program, marks=True))
        assert {name: simulated[name] for name in recorded} == recorded
        first_row = next(mark.rows for mark in program.marks if mark.name == "init")
    if run["meta"]["ac"] == "none":
        assert copies(program, first_row) == run["copies"]


def test_recordings_cover_all_stages_and_parameters_on_the_host() -> None:
    assert {run["meta"]["stage"] for run in RUNS} == {1, 2, 3}
    assert any("offload_param" in run["meta"]["zero_cfg"] for run in RUNS)
