"""CUDA_LAUNCH_BLOCKING=1: the host waits for everything that it launches."""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import Outcome, simulate_setup
from sim.program.program import Row
from sim.scenario import ScenarioError, load_text

ONE = """
model: {preset: gpt-tiny}
cluster: {gpu: a100, gpus_per_node: 1}
batch: {micro_batch: 2, seq_len: 512, accumulation: 2}
"""
SHARDED = """
model: {preset: llama-tiny}
cluster: {gpu: a100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 2048}
parallel: {fsdp: {degree: 8}}
checkpoint: {every: 1}
"""
STAGES = """
model: {preset: gpt-tiny, implementation: megatron, layers: 8}
cluster: {gpu: a100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 512, accumulation: 8}
precision: {parameters: bf16, compute: bf16}
parallel: {tensor: {degree: 2}, pipeline: {degree: 4, schedule: 1f1b}}
"""


def played(text: str, blocking: bool, framework: str = "eager") -> Outcome:
    host = f"host: {{launch_blocking: {str(blocking).lower()}, framework: {framework}}}\n"
    return simulate_setup(load_text(f"{text}{host}strategies: {{s: {{}}}}\n", "blocking").strategies[0])


def works(outcome: Outcome, rank: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Kind, issue, start and end of all that takes time on a stream, in issue order, transfers between stages left out."""
    lanes = outcome.ranks[rank].lanes
    assert lanes is not None
    runs = lanes.runs
    return lanes.program.row_kind[runs], lanes.issue_ns[runs], lanes.start_ns[runs], lanes.end_ns[runs]


@pytest.mark.parametrize("text", [ONE, SHARDED, STAGES], ids=["one GPU", "FSDP2", "stages"])
def test_nothing_is_issued_before_what_went_before_has_ended(text: str) -> None:
    outcome = played(text, True)
    for rank in range(len(outcome.ranks)):
        _, issued, started, ended = works(outcome, rank)
        assert (issued[1:] >= ended[:-1] - 1e-3).all()
        assert (started >= issued - 1e-3).all()
    _, issued, _, ended = works(played(text, False))
    assert (issued[1:] < ended[:-1]).any()


def test_on_one_gpu_the_hosts_time_per_launch_adds_to_the_kernels() -> None:
    """A step is the kernels and, for each, one launch (5 us), and what the host does besides."""
    one, blocking = played(ONE, False), played(ONE, True)
    kernels = int((works(blocking)[0] == Row.LAUNCH).sum())
    _, _, started, ended = works(blocking)
    gaps = started[1:] - ended[:-1]
    assert gaps.min() == pytest.approx(5000, abs=1)
    assert kernels * 5000 <= gaps.sum() + 5000
    assert blocking.time is not None
    assert one.time is not None
    assert blocking.time.step_ns > one.time.step_ns


def test_bytes_do_not_depend_on_it() -> None:
    waits, goes_on = (played(SHARDED, blocking) for blocking in (True, False))
    assert waits.ranks[0].steady.allocated_bytes == goes_on.ranks[0].steady.allocated_bytes


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
def test_schedules_that_receive_early_are_refused(schedule: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        played(STAGES.replace("1f1b", schedule), True)
    assert f"host.launch_blocking  true: {schedule} asks for transfers before it computes" in str(caught.value)
