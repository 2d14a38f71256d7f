"""Whole recorded training steps: every allocation at its address, every free, every mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import find
from tests.exact.compare import Comparison, compare_file

_RECORDINGS = find()
FOUND = [*_RECORDINGS["step"], *_RECORDINGS["last_step"]]
done: list[Comparison] = []


@pytest.mark.parametrize(("name", "path"), FOUND, ids=[name for name, _ in FOUND])
def test_a_recording_of_whole_steps_is_equal_event_for_event(name: str, path: Path) -> None:
    comparison = compare_file(name, path)
    done.append(comparison)
    assert comparison.differences == ()


def test_recordings_of_whole_steps_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    if not done:
        pytest.skip("no recording was compared in this run")
    equal = sum(comparison.equal for comparison in done)
    with capsys.disabled():
        print(f"\nrecorded steps: {equal} / {len(done)} equal, {sum(c.events for c in done):,} events compared")
    assert equal == len(done)
