"""The allocator equals recordings of PyTorch's own, event by event.

SIM_RECORDINGS names a folder to read instead of the kept recordings (and the shared ones where present).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.engine.allocator import AllocatorSettings, CachingAllocator
from sim.engine.allocator.driver import RANGE_BASE, SEGMENT_BASE
from tests.exact import allocator_recordings as recordings
from tests.exact.allocator_recordings import Replay

GAUGES = (
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
    "inactive_split_bytes",
    "requested_bytes",
    "allocation",
    "active",
    "segment",
    "inactive_split",
)
BYTE_GAUGES = GAUGES[:5]
COUNTERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
VALIDATE_EVERY = 25
DEVICE_BYTES = 400 << 30
"""Of the recordings that name no capacity."""

FOUND = recordings.find()


def each(holds: str) -> pytest.MarkDecorator:
    """One test per recording that holds this."""
    files = FOUND[holds]
    return pytest.mark.parametrize("path", [path for _, path in files], ids=[name for name, _ in files])


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Counts what was compared; told at the end."""
    counts: Counter[str] = Counter()
    yield counts
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for what in ("recordings", "streams"):
            equal, total, events = (counts[f"{what} {part}"] for part in ("equal", "total", "events"))
            print(f"\nallocator {what} equal {equal} / {total}, events compared {events}", end="")


def test_recordings_are_found() -> None:
    assert any(FOUND.values()), f"no recordings in {recordings.folders()}"


@each("events")
def test_a_recording_is_reproduced_after_every_event(path: Path, tally: Counter[str]) -> None:
    data = recordings.load(path)
    tally["recordings total"] += 1
    replay = Replay(data["meta"])
    in_order = True
    for index, (event, row) in enumerate(zip(data["events"], data["rows"], strict=True)):
        replay.trace.clear()
        replay.allocator.driver.refusals.clear()
        assert (index, event, replay.play(event)) == (index, event, row["r"])
        check_row(replay, row)
        in_order &= replay.trace == row.get("t", [])
        if str(index) in data["layouts"]:
            assert replay.layout() == data["layouts"][str(index)]
        if index % VALIDATE_EVERY == 0:
            replay.allocator.validate()
        tally["recordings events"] += 1
    check_end(replay, data["meta"], in_order)
    tally["recordings equal"] += 1


def check_row(replay: Replay, row: dict[str, Any]) -> None:
    """Statistics, counters, trace entries (as a multiset), refused requests and layout after one event."""
    statistics = replay.allocator.statistics
    assert [getattr(statistics, name).current[0] for name in GAUGES] == row["st"]
    assert [getattr(statistics, name) for name in COUNTERS] == row["n"]
    assert Counter(map(tuple, replay.trace)) == Counter(map(tuple, row.get("t", [])))
    assert replay.allocator.driver.refusals == [call[1] for call in row.get("drv", []) if call[0] == "fail"]
    assert replay.crc() == row["crc"]


def check_end(replay: Replay, meta: dict[str, Any], in_order: bool) -> None:
    """Peaks per pool and the statistics of oversize blocks.

    When several waiting frees complete within one event their order is unspecified, and with it how many split blocks
    there are in between: the peaks of inactive_split are compared only if all entries came in the recorded order.
    """
    statistics = replay.allocator.statistics
    for name, peaks in meta.get("peaks", {}).items():
        if name.startswith("inactive_split") and not in_order:
            continue
        assert getattr(statistics, name).peak == [peaks["all"], peaks["small_pool"], peaks["large_pool"]], name
    for name in ("oversize_allocations", "oversize_segments"):
        if name in meta:
            gauge = getattr(statistics, name)
            assert (name, gauge.current[0], gauge.peak[0]) == (name, meta[name]["current"], meta[name]["peak"])


@each("step")
def test_a_recording_of_a_training_step_gets_every_address(path: Path, tally: Counter[str]) -> None:
    data = recordings.load(path)
    tally["streams total"] += 1
    allocator, base = allocator_for(data["meta"])
    kind, handle, size, stream, address = recordings.stream_of(data)
    result = allocator.play(kind, handle, size, stream)
    assert result.out_of_memory is None
    assert np.array_equal(result.address - base, address)
    allocator.validate()
    tally["streams equal"] += 1
    tally["streams events"] += len(address)


@each("step")
def test_a_recording_of_a_training_step_gets_every_peak_between_marks(path: Path) -> None:
    data = recordings.load(path)
    allocator, _ = allocator_for(data["meta"])
    kind, handle, size, stream, _ = recordings.stream_of(data)
    start = 0
    for mark, stop in zip(data["marks"], mark_positions(data), strict=True):
        if mark["name"] == "oom":  # the refused request, which flushed the cache, is not among the events
            break
        now = slice(start, stop)
        allocator.statistics.reset_peaks()
        allocator.play(kind[now], handle[now], size[now], stream[now])
        for name in BYTE_GAUGES:
            recorded = mark.get(name, mark.get(name.removesuffix("_bytes")))
            gauge = getattr(allocator.statistics, name)
            if recorded is not None:
                assert (mark["name"], name, gauge.current[0], gauge.peak[0]) == (mark["name"], name, *recorded)
        start = stop
    allocator.validate()


def mark_positions(data: dict[str, Any]) -> list[int]:
    """Allocations and frees before each mark of a training step that has its figures; a trace may have more marks."""
    positions, events = [], 0
    names = {mark["name"] for mark in data["marks"]}
    for event in data["trace"]:
        if event[0] in ("mark", "@") and (event[1] if isinstance(event, list) else event[1:].split(" ")[0]) in names:
            positions.append(events)
        events += event[0] in ("alloc", "free_requested") or (isinstance(event, list) and event[0] in ("a", "f"))
    return positions


def allocator_for(meta: dict[str, Any]) -> tuple[CachingAllocator, int]:
    """An empty allocator as a training step's recording had it, and the address that its addresses count from."""
    settings = AllocatorSettings.parse(meta.get("settings") or "", meta["torch"])
    allocator = CachingAllocator(settings, meta.get("capacity") or DEVICE_BYTES, version=meta["torch"])
    return allocator, RANGE_BASE if settings.expandable_segments else SEGMENT_BASE
