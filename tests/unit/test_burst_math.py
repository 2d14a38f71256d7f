"""Positions and starts inside a burst of kernels of 10, 0, 20 and 30 ns, contended twice that."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine.burst_math import position, position_starved, starved, work_done
from sim.program.world import Burst

DURATIONS = np.array([10, 0, 20, 30])
BURST = Burst(np.array([5, 5, 5, 50]), np.stack([DURATIONS, 2 * DURATIONS]))


@pytest.mark.parametrize(
    ("done_ns", "reached"),
    [(0, (0, 0.0)), (5, (0, 0.5)), (10, (2, 0.0)), (15, (2, 0.25)), (59, (3, 29 / 30)), (60, (4, 0.0)), (61, (4, 0.0))],
)
def test_position_is_the_kernel_reached_and_its_fraction(done_ns: float, reached: tuple[int, float]) -> None:
    assert position(BURST.work_ns[0], 0, done_ns) == reached


def test_position_never_falls_back_behind_a_kernel_that_was_reached() -> None:
    assert position(BURST.work_ns[0], 2, 10 - 1e-12) == (2, 0.0)


@pytest.mark.parametrize("done_ns", [0.0, 5.0, 15.0, 29.5, 45.0])
def test_work_done_is_the_inverse_of_position(done_ns: float) -> None:
    assert work_done(BURST.work_ns[0], *position(BURST.work_ns[0], 0, done_ns)) == done_ns


def test_starved_kernels_start_at_their_issue_or_after_their_predecessor() -> None:
    starts, ends = starved(BURST, 1.0, 100, 105, level=0, kernel=0, fraction=0.0)
    assert starts.tolist() == [105, 115, 115, 165]
    assert ends.tolist() == [115, 115, 135, 195]


def test_starved_kernels_do_only_what_is_left_of_the_first() -> None:
    starts, ends = starved(BURST, 2.0, 100, 120, level=1, kernel=2, fraction=0.25)
    assert starts.tolist() == [120, 180]
    assert ends.tolist() == [180, 300]


@pytest.mark.parametrize(
    ("now_ns", "reached"), [(100, (0, 0.0)), (110, (0, 0.5)), (125, (2, 0.5)), (140, (3, 0.0)), (195, (4, 0.0))]
)
def test_position_among_planned_starts_knows_idle_time(now_ns: float, reached: tuple[int, float]) -> None:
    starts, ends = starved(BURST, 1.0, 100, 105, level=0, kernel=0, fraction=0.0)
    assert position_starved(starts, ends, BURST.duration_ns[0], 0, now_ns) == reached
