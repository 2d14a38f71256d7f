"""Whole recorded training steps: every allocation at its address, every free, every mark.

What is not equal stands in known_differences.yaml, which may only shrink.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.exact.allocator_recordings import find
from tests.exact.compare import Comparison, compare_file

MADE_WHOLE = "sharded_adapters"
"""Recordings of models that were whole on the GPU before they were split: all addresses are others' (test_recorded_adapters
compares their bytes)."""
_RECORDINGS = find()
FOUND = [(n, path) for n, path in (*_RECORDINGS["step"], *_RECORDINGS["last_step"]) if path.parent.name != MADE_WHOLE]
KNOWN: dict[str, Any] = YAML(typ="safe").load(Path(__file__).parent / "known_differences.yaml")
done: list[Comparison] = []


@pytest.mark.parametrize(("name", "path"), FOUND, ids=[name for name, _ in FOUND])
def test_a_recording_of_whole_steps_is_equal_event_for_event(name: str, path: Path) -> None:
    comparison = compare_file(name, path)
    done.append(comparison)
    known = KNOWN.get(path.name.removesuffix(".json.gz"))
    if known is None:
        assert comparison.differences == ()
        return
    assert comparison.differences, "equal by now: take it out of known_differences.yaml"
    assert comparison.equal_allocations >= known["equal_allocations"], comparison.differences[0]


def test_recordings_of_whole_steps_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    if not done:
        pytest.skip("no recording was compared in this run")
    equal = sum(comparison.equal for comparison in done)
    with capsys.disabled():
        print(f"\nrecorded steps: {equal} / {len(done)} equal, {sum(c.events for c in done):,} events compared")
    assert len(done) - equal <= len(KNOWN)
