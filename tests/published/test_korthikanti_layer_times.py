"""One 22B layer and whole steps on 8 A100s against tables 4 and 5 of Korthikanti et al. 2022. Nothing is fitted to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.api import device_memory, load, play_time, simulate_setup
from sim.program.program import COMPUTE
from sim.runtime.record import record
from tests.published.korthikanti import CASES, setup_of

PUBLISHED_MS = {
    "none": (7.7, 11.9),
    "sp": (7.2, 11.8),
    "full": (7.7, 19.5),
    "selective": (7.7, 13.2),
    "selective-sp": (7.2, 13.1),
}
"""Forward, backward (with recomputation)."""
PUBLISHED_STEP_S = {"full": 1.42, "selective-sp": 1.10}
TOLERANCE = 0.07
SCENARIO = Path(__file__).parents[2] / "scenarios" / "megatron_tp.yaml"


def device_ms(strategy: str, layers: int) -> tuple[float, float]:
    """Forward and backward of a model of so many layers, in its second step."""
    setup = setup_of(CASES[0], strategy, layers)
    program = record(setup, steps=2)
    lanes = play_time(setup, [program], [device_memory(setup, program)])[0]
    rows = {mark.name: mark.rows for mark in program.marks}

    def end(mark: str) -> float:
        ended = lanes.end_ns[: rows[mark]][np.equal(program.row_stream[: rows[mark]], COMPUTE)]
        return float(ended.max()) / 1e6

    start, middle, finish = end("s0.end"), end("s1.fwd0"), end("s1.bwd0")
    return middle - start, finish - middle


@pytest.fixture(scope="module")
def layer_ms() -> dict[str, tuple[float, float]]:
    """What two layers more take, halved."""
    times = {}
    for strategy in PUBLISHED_MS:
        four, six = device_ms(strategy, 4), device_ms(strategy, 6)
        times[strategy] = ((six[0] - four[0]) / 2, (six[1] - four[1]) / 2)
    return times


def test_each_layer_time_is_within_7_percent(layer_ms: dict[str, tuple[float, float]]) -> None:
    errors = {}
    for strategy, published in PUBLISHED_MS.items():
        simulated = layer_ms[strategy]
        errors[strategy] = sum(simulated) / sum(published) - 1
        forward, backward = (f"{a:.1f} ({b:.1f})" for a, b in zip(simulated, published, strict=True))
        print(f"{strategy:13} forward {forward}  backward {backward} ms  error {errors[strategy]:+.1%}")
    assert max(map(abs, errors.values())) < TOLERANCE


def test_the_order_of_the_five_is_the_published_one(layer_ms: dict[str, tuple[float, float]]) -> None:
    assert sorted(layer_ms, key=lambda s: sum(layer_ms[s])) == sorted(PUBLISHED_MS, key=lambda s: sum(PUBLISHED_MS[s]))


def test_whole_steps_of_the_model_that_fit_are_within_5_percent_and_their_ratio_within_2() -> None:
    step_s = {}
    for setup in load(SCENARIO).strategies:
        if setup.name in PUBLISHED_STEP_S:
            time = simulate_setup(setup).time
            assert time is not None
            step_s[setup.name] = time.step_ns / 1e9
            print(f"{setup.name:13} {step_s[setup.name]:.2f} s ({PUBLISHED_STEP_S[setup.name]:.2f})")
    assert all(abs(step_s[name] / published - 1) < 0.05 for name, published in PUBLISHED_STEP_S.items())
    published_ratio = PUBLISHED_STEP_S["full"] / PUBLISHED_STEP_S["selective-sp"]
    assert abs(step_s["full"] / step_s["selective-sp"] / published_ratio - 1) < 0.02
