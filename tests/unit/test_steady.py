"""What "steady" means: the steps that repeat for ever, not just the second one."""

from __future__ import annotations

from pathlib import Path

import sim

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def only(name: str, *overrides: str) -> sim.Outcome:
    scenario = sim.load(SCENARIOS / "fsdp_ckpt.yaml", overrides)
    (setup,) = [s for s in scenario.strategies if s.name == name]
    return sim.api.simulate_setup(setup)


def test_with_room_the_third_step_repeats() -> None:
    outcome = only("full")
    assert (outcome.cycle.first, outcome.cycle.period, outcome.cycle.settled) == (2, 1, True)
    assert len(outcome.memory.steps()) == 3


def test_near_the_limit_a_cycle_of_three_steps_repeats_and_its_worst_counts() -> None:
    outcome = only("none")
    assert outcome.cycle.period == 3
    reserved = [int(outcome.memory.reserved_bytes[a:b].max()) for a, b in outcome.memory.steps()]
    assert outcome.steady.reserved_bytes == max(reserved[outcome.cycle.first :])
    assert len(set(reserved[outcome.cycle.first :])) > 1
    calls = [sum(a <= event < b for event, _, _ in outcome.memory.driver_calls) for a, b in outcome.memory.steps()]
    assert all(calls)


def test_what_survives_two_steps_and_dies_in_the_third_does_not_fit() -> None:
    outcome = only("none", "cluster.usable_memory='73.5 GiB'")
    assert not outcome.fits
    assert outcome.memory.out_of_memory is not None
    assert len([m for m in outcome.program.marks if m.name.endswith(".end") and outcome.memory.mark(m.name)]) == 2
