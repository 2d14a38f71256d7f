"""Activations on side streams, recorded: every allocation at its address, every free, every mark.

Real runs of torch 2.14.1 over a fake driver, with a saved-tensor hook around every block that does what StreamedLayer says:
freed by events with five tensors in flight, or by record_stream; fetched ahead or when asked for. The fake driver's copies
end at once, as the allocator alone takes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "streamed").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recording_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_cover_both_ways_to_free() -> None:
    metas = [load(path)["meta"] for path in RECORDINGS]
    assert {meta.get("release", "record_stream") for meta in metas} == {"events", "record_stream"}
    assert {meta.get("ahead", 1) for meta in metas} == {0, 1}
