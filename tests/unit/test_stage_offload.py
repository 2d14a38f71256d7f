"""Offload that knows the pipeline: which bundles leave when, what waits for what, and what stays on the device."""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.program.program import COMPUTE, DEVICE_TO_HOST, Owner, Program, Row
from sim.runtime.train_pipeline import record_pipeline
from sim.scenario import ScenarioError, load_text
from sim.scenario.setup import Setup
from tests.published.korthikanti import alive_bytes

MIB = 1 << 20
TEXT = """
model: {preset: llama-tiny, implementation: megatron, layers: 8}
cluster: {gpu: h100, gpus_per_node: 4}
batch: {micro_batch: 4, seq_len: 1024, accumulation: 8}
precision: {parameters: bf16, compute: bf16}
parallel: {pipeline: {degree: 4}, data: {degree: 1}}
"""
ALL = "offload: {what: stage_activations}\n"


def setup_of(more: str = "", text: str = TEXT) -> Setup:
    return load_text(text + more, "stages").strategies[0]


def half(share: float = 0.5) -> str:
    return f"offload: {{what: stage_activations, share: {share}}}\n"


def copies(program: Program, direction: str) -> list[tuple[str, int]]:
    """(mark that comes next, bytes) of the copies one way, those of a moment added up."""
    ends = [(mark.rows, mark.name) for mark in program.marks]
    found: dict[str, int] = {}
    for row in np.flatnonzero(program.row_kind == Row.COPY).tolist():
        copy = program.copies[program.row_argument[row]]
        if copy.direction == direction:
            name = next(name for rows, name in ends if rows > row)
            found[name] = found.get(name, 0) + copy.bytes
    return list(found.items())


def activations(program: Program, mark: str) -> int:
    return alive_bytes(program, mark, (Owner.ACTIVATION,))


def test_a_bundle_leaves_beside_the_next_action_and_returns_beside_the_one_before_its_backward() -> None:
    program = record_pipeline(setup_of(ALL), 1, steps=1)
    order = [mark.name for mark in program.marks if "wd" in mark.name]
    assert order[:6] == ["s0.fwd0", "s0.fwd1", "s0.fwd2", "s0.bwd0", "s0.fwd3", "s0.bwd1"]
    left = [name for name, _ in copies(program, "device_to_host")]
    assert left == ["s0.fwd1", "s0.fwd2", "s0.bwd0", "s0.bwd1", "s0.bwd2", "s0.bwd3", "s0.bwd4", "s0.bwd5"]
    back = [name for name, _ in copies(program, "host_to_device")]
    assert back == ["s0.fwd2", "s0.bwd0", "s0.bwd1", "s0.bwd2", "s0.bwd3", "s0.bwd4", "s0.bwd5", "s0.bwd6"]


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_the_share_of_the_bytes_that_are_saved_leaves_in_whole_mib_and_all_of_it_returns(share: float) -> None:
    whole = copies(record_pipeline(setup_of(ALL), 1, steps=1), "device_to_host")
    program = record_pipeline(setup_of(half(share)), 1, steps=1)
    out, back = copies(program, "device_to_host"), copies(program, "host_to_device")
    (total,) = {size for _, size in whole}
    assert {size for _, size in out} == {-(-int(total * share) // MIB) * MIB}
    assert {size for _, size in back} == {size for _, size in out}
    assert len(out) == len(back) == 8


def test_what_waits_without_its_share_is_the_rest_and_the_last_bundle_is_not_touched() -> None:
    """At the end of the third forward of the first stage: one bundle away, one leaving, one just saved."""
    plain, half_away = (record_pipeline(setup_of(more), 0, steps=1) for more in ("", half()))
    one = activations(plain, "s0.fwd2") - activations(plain, "s0.fwd1")
    (size,) = {size for _, size in copies(half_away, "device_to_host")}
    rest_of_a_cut_tensor = activations(half_away, "s0.fwd2") - (activations(plain, "s0.fwd2") - size)
    assert 0 <= rest_of_a_cut_tensor <= one // 10


def test_the_last_rank_keeps_what_comes_back_at_once() -> None:
    program = record_pipeline(setup_of(ALL), 3, steps=1)
    assert not copies(program, "device_to_host")
    interleaved = TEXT.replace("degree: 4}", "degree: 4, schedule: interleaved, virtual: 2}", 1)
    program = record_pipeline(setup_of(ALL, interleaved), 3, steps=1)
    assert len(copies(program, "device_to_host")) == len(copies(program, "host_to_device")) > 0


def test_the_longer_micro_batches_wait_the_more_memory_is_saved() -> None:
    interleaved = TEXT.replace("degree: 4}", "degree: 4, schedule: interleaved, virtual: 2}", 1)
    peaks = []
    for more in ("", half(0.3), half(0.6), ALL):
        outcome = simulate_setup(setup_of(more, interleaved.replace("accumulation: 8", "accumulation: 16")))
        assert outcome.time is not None
        peaks.append(int(outcome.memory.allocated_bytes.max()))
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_compute_waits_for_a_copy_before_its_bytes_are_used_again() -> None:
    """The free of what left comes behind a wait for the copy."""
    program = record_pipeline(setup_of(ALL), 1, steps=1)
    waits = set(np.flatnonzero((program.row_kind == Row.WAIT) & (program.row_stream == COMPUTE)).tolist())
    records = np.flatnonzero((program.row_kind == Row.RECORD) & (program.row_stream == DEVICE_TO_HOST))
    events = set(program.row_argument[records].tolist())
    waited = {int(program.row_argument[row]) for row in waits}
    assert events <= waited


def test_thrown_away_outputs_stay_thrown_away() -> None:
    discard = "checkpoint: {discard: [norm, activation]}\n"
    kept, discarded = (record_pipeline(setup_of(ALL + more), 1, steps=1) for more in ("", discard))
    sizes = [{size for _, size in copies(program, "device_to_host")}.pop() for program in (kept, discarded)]
    tokens, h, f = 4 * 1024, 512, 1536
    assert sizes[0] - sizes[1] == 2 * 2 * tokens * (2 * h + f)


@pytest.mark.parametrize(
    ("old", "new", "more", "path", "text"),
    [
        ("pipeline: {degree: 4}, data: {degree: 1}", "data: {degree: 4}", ALL, "offload.what", "there are no stages"),
        ("megatron", "torchtitan", ALL, "offload.what", "is written for Megatron's stages"),
        (
            "degree: 4}",
            "degree: 4, schedule: zb-v}",
            ALL,
            "offload.what",
            "is not modelled with backwards that are split",
        ),
        ("", "", "offload: {what: activations, share: 0.5}\n", "offload.share", "is of stage_activations"),
        (
            "",
            "",
            "offload: {what: stage_activations, look_ahead: 2}\n",
            "offload.look_ahead",
            "by the pipeline's order",
        ),
        ("", "", "offload: {what: stage_activations, streams: compute}\n", "offload.streams", "leave on side streams"),
        ("", "", "offload: {what: stage_activations, share: 1.5}\n", "offload.share", "1.5"),
    ],
)
def test_what_does_not_fit_is_a_problem(old: str, new: str, more: str, path: str, text: str) -> None:
    scenario = TEXT.replace(old, new, 1).replace(
        ", data: {degree: 1}", "" if new == "torchtitan" else ", data: {degree: 1}"
    )
    with pytest.raises(ScenarioError) as caught:
        load_text(scenario + more, "stages")
    assert any(p.path == path and text in p.text for p in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved, virtual: 2"])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_steady_state_that_is_recorded_once_is_what_recording_all_of_it_gives(rank: int, schedule: str) -> None:
    text = TEXT.replace("accumulation: 8", "accumulation: 32").replace("layers: 8", "layers: 8")
    setup = setup_of(half(0.4), text.replace("degree: 4}", f"degree: 4, schedule: {schedule}}}", 1))
    folded, whole = (record_pipeline(setup, rank, 3, folds=folds) for folds in (True, False))
    for column in ("row_kind", "row_stream", "row_argument", "mem_kind", "mem_handle", "mem_bytes", "mem_row"):
        assert np.array_equal(getattr(folded, column), getattr(whole, column)), column
    assert folded.copies == whole.copies
