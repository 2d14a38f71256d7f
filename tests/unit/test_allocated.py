"""`allocator: off`: bytes of tensors without an allocator."""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.engine.allocated import sum_memory
from sim.report.notes import notes
from sim.scenario import ScenarioError, load_text
from sim.scenario.setup import Setup
from tests.unit.scenarios import PIPELINE, TINY


def setup_of(text: str, allocator: str) -> Setup:
    return load_text(f"{text}allocator: {allocator}\n", "test").strategies[0]


@pytest.mark.parametrize("text", [TINY, PIPELINE])
def test_bytes_are_those_of_the_allocator_but_for_its_slack(text: str) -> None:
    summed, played = (simulate_setup(setup_of(text, allocator)) for allocator in ("off", '""'))
    for ours, theirs in zip(summed.ranks, played.ranks):
        first, last = ours.memory.steps()[1]
        slack = theirs.memory.allocated_bytes[first:last] - ours.memory.allocated_bytes[first:last]
        assert slack.min() >= 0 and slack.max() < 0.02 * theirs.steady.allocated_bytes
        assert ours.steady.reserved_bytes == ours.steady.active_bytes == ours.steady.allocated_bytes
    assert summed.cycle.steps == 2  # bytes repeat at once


def test_times_are_those_of_a_run_whose_driver_is_not_asked() -> None:
    summed, played = (simulate_setup(setup_of(TINY, allocator)) for allocator in ("off", '""'))
    assert summed.time is not None and played.time is not None
    assert summed.time.step_ns == pytest.approx(played.time.step_ns, rel=1e-3)


def test_what_is_left_out_is_said() -> None:
    assert any("No allocator was played" in note for note in notes(simulate_setup(setup_of(TINY, "off"))))
    assert not any("No allocator" in note for note in notes(simulate_setup(setup_of(TINY, '""'))))


def test_too_many_bytes_are_an_out_of_memory() -> None:
    needed = simulate_setup(setup_of(TINY, "off")).steady.device_bytes
    limit = f"gpus_per_node: 2, usable_memory: {needed // 2**20 - 1} MiB"
    outcome = simulate_setup(setup_of(TINY.replace("gpus_per_node: 2", limit), "off"))
    assert not outcome.fits
    refused = outcome.memory.out_of_memory
    assert refused is not None
    assert refused.allocated_bytes + refused.driver_bytes > outcome.capacity_bytes >= refused.allocated_bytes
    assert outcome.memory.played == refused.event
    whole = sum_memory(outcome.program, 1 << 50)
    assert np.array_equal(whole.allocated_bytes[: refused.event], outcome.memory.allocated_bytes)
    assert outcome.unlimited.played > refused.event


def test_off_is_the_only_such_word() -> None:
    with pytest.raises(ScenarioError, match="allocator"):
        setup_of(TINY, "none")
