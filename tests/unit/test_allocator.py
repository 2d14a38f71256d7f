"""Settings, driver, errors and stories of the caching allocator; its rules are tested against recordings."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine.allocator import AllocatorSettings, CachingAllocator, Driver, OutOfMemory, SettingsError
from sim.engine.allocator.driver import SEGMENT_BASE
from sim.program.program import Mem

MIB = 1 << 20


def allocator(text: str = "", capacity_bytes: int = 1 << 30, version: str = "2.14") -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(text, version), capacity_bytes, version=version)


def columns(*rows: tuple[int, int, int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(rows, np.int64).reshape(-1, 4).T


def test_an_empty_text_gives_the_defaults_of_pytorch() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings.parse(" , ") == AllocatorSettings()


def test_every_setting_is_read_and_spaces_do_not_matter() -> None:
    text = (
        "backend:native, expandable_segments: True ,max_split_size_mb:128,max_non_split_rounding_mb:64,"
        "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:32,"
        "per_process_memory_fraction:0.5,pinned_use_background_threads:True"
    )
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        gc_threshold=0.8,
        roundup_divisions=(1,) * 9 + (2, 4) + (8,) * 5,
        large_segment_bytes=32 * MIB,
        memory_fraction=0.5,
    )


def test_an_open_interval_replaces_the_last_named_one_before_2_12() -> None:
    text = "roundup_power2_divisions:[16:2,64:8,>:0]"
    assert AllocatorSettings.parse(text, "2.14").roundup_divisions == (2,) * 5 + (0, 8) + (0,) * 9
    assert AllocatorSettings.parse(text, "2.9.1").roundup_divisions == (2,) * 5 + (0, 0) + (0,) * 9


def test_all_problems_of_a_text_are_told_at_once_with_the_nearest_name() -> None:
    text = (
        "expandable_segmnts:True,max_split_size_mb:8,garbage_collection_threshold:80,expandable_segments:true,"
        "backend:cudaMallocAsync,roundup_power2_divisions:[3:1,4:5],large_segment_size_mb:x"
    )
    with pytest.raises(SettingsError) as caught:
        AllocatorSettings.parse(text)
    told = {(problem.key, problem.value, problem.nearest) for problem in caught.value.problems}
    assert told == {
        ("expandable_segmnts", "True", "expandable_segments"),
        ("max_split_size_mb", "8", None),
        ("garbage_collection_threshold", "80", None),
        ("expandable_segments", "true", "True"),
        ("backend", "cudaMallocAsync", None),
        ("roundup_power2_divisions", "[3:1,4:5]", None),
        ("large_segment_size_mb", "x", None),
    }
    assert len(caught.value.problems) == 8, "both wrong intervals are named"
    assert "did you mean expandable_segments?" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb",
        "max_split_size_mb=30",
        ":",
        "x",
        "roundup_power2_divisions:[]",
        "max_split_size_mb:[",
        "a:b:c",
    ],
)
def test_text_that_is_no_list_of_settings_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        AllocatorSettings.parse(text)


def test_options_belong_to_versions() -> None:
    with pytest.raises(SettingsError, match=r"PyTorch 2\.9 has no such option"):
        AllocatorSettings.parse("large_segment_size_mb:64", "2.9")
    with pytest.raises(SettingsError, match="more than 20"):
        AllocatorSettings.parse("max_split_size_mb:20", "2.9")
    assert AllocatorSettings.parse("max_split_size_mb:20", "2.14").max_split_bytes == 20 * MIB
    with pytest.raises(ValueError, match="not a PyTorch version"):
        AllocatorSettings.parse("", "newest")


def test_a_size_below_the_large_segment_is_refused() -> None:
    with pytest.raises(SettingsError, match="at least 64"):
        AllocatorSettings.parse("large_segment_size_mb:64,max_split_size_mb:30")


def test_an_out_of_memory_carries_request_and_what_was_free() -> None:
    device = allocator(capacity_bytes=30 * MIB)
    device.malloc(20 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        device.malloc(3 * MIB + 1)
    problem = caught.value
    sizes = (problem.requested_bytes, problem.rounded_bytes, problem.driver_bytes, problem.device_free_bytes)
    assert sizes == (3 * MIB + 1, 3 * MIB + 512, 20 * MIB, 10 * MIB)
    assert (problem.allocated_bytes, problem.reserved_bytes) == (20 * MIB, 20 * MIB)


def test_play_returns_an_out_of_memory_with_its_position() -> None:
    device = allocator(capacity_bytes=48 * MIB)
    events = columns(
        (Mem.ALLOC, 0, 24 * MIB, 0),
        (Mem.ALLOC, 1, 24 * MIB, 0),
        (Mem.FREE, 0, 0, 0),
        (Mem.ALLOC, 2, 25 * MIB, 0),
        (Mem.FREE, 1, 0, 0),
    )
    result = device.play(*events)
    assert result.out_of_memory is not None
    assert result.played == 3
    assert result.reserved_bytes.tolist() == [24 * MIB, 48 * MIB, 48 * MIB]
    assert [(call.event, call.action, call.size_bytes) for call in result.driver_calls] == [
        (0, "segment_alloc", 24 * MIB),
        (1, "segment_alloc", 24 * MIB),
        (3, "flush", 0),
        (3, "segment_free", 24 * MIB),
    ]


def test_handles_keep_their_meaning_over_calls_of_play_and_may_be_used_again() -> None:
    device = allocator()
    device.play(*columns((Mem.ALLOC, 0, 512, 0), (Mem.ALLOC, 1, 0, 0), (Mem.ALLOC, 2, 512, 0)))
    device.play(*columns((Mem.FREE, 0, 0, 0), (Mem.FREE, 1, 0, 0)))
    result = device.play(*columns((Mem.ALLOC, 0, 700, 0), (Mem.ALLOC, 1, 100, 0)))
    device.validate()
    assert (result.address - SEGMENT_BASE).tolist() == [1024, 0]
    assert device.allocated_bytes == 1024 + 512 + 512


@pytest.mark.parametrize(
    "rows",
    [
        [(Mem.FREE, 0, 0, 0)],
        [(Mem.ALLOC, 0, 1, 0), (Mem.ALLOC, 0, 1, 0)],
        [(Mem.ALLOC, 0, 1, 0), (Mem.FREE, 0, 0, 0), (Mem.FREE, 0, 0, 0)],
        [(Mem.ALLOC, 0, 1, 0), (Mem.FREE, 0, 0, 0), (Mem.RECORD_STREAM, 0, 0, 1)],
        [(Mem.RECORD_STREAM, 0, 0, 1), (Mem.ALLOC, 0, 1, 0)],
    ],
)
def test_play_refuses_a_handle_that_is_not_live(rows: list[tuple[int, int, int, int]]) -> None:
    device = allocator()
    with pytest.raises(ValueError, match=r"memory event \d: .* of handle 0"):
        device.play(*columns(*rows))
    assert device.calls == 0


def test_a_block_cannot_be_freed_twice() -> None:
    device = allocator()
    block = device.malloc(1000)
    device.free(block)
    with pytest.raises(ValueError, match="is free"):
        device.free(block)


def test_a_request_of_no_bytes_takes_no_memory() -> None:
    device = allocator()
    block = device.malloc(0)
    device.free(block)
    assert (block.address, device.statistics.num_device_alloc) == (0, 0)


def test_a_story_tells_where_a_block_came_from_and_what_it_waits_for() -> None:
    device = CachingAllocator(AllocatorSettings(), 1 << 30, event_finished=lambda event: False)
    block = device.malloc(3 * MIB)
    device.record_stream(block, 2)
    assert "also used by stream 2" in device.story(block)
    device.free(block)
    told = device.story(block)
    assert "call 1: 3145728 bytes for stream 0" in told
    assert "from a new segment of 20971520 bytes" in told
    assert "call 3: freed" in told
    assert "not reusable before 1 more event" in told
    device.empty_cache()
    assert "reusable" in device.story(block)


def test_an_allocator_without_a_driver_uses_all_of_the_device() -> None:
    assert allocator(capacity_bytes=5 * MIB).driver.free_bytes == 5 * MIB


def test_driver_addresses_follow_the_policy() -> None:
    def places(policy: str) -> list[int]:
        driver = Driver(100 * MIB, policy)  # type: ignore[arg-type]
        first, second = driver.malloc(3 * MIB), driver.malloc(2 * MIB)
        assert first is not None and second is not None
        driver.free(first)
        third = driver.malloc(4 * MIB)
        assert third is not None
        return [(address - first) // MIB for address in (second, third)]

    assert places("first_fit") == [4, 0]
    assert places("rising") == [4, 6]
    assert places("falling") == [-2, -6]


def test_pages_are_obtained_all_or_none() -> None:
    driver = Driver(50 * MIB)
    assert not driver.create_pages(3, 20 * MIB)
    assert (driver.used_bytes, driver.refusals) == (0, [20 * MIB])
    assert driver.create_pages(2, 20 * MIB)
    assert driver.free_bytes == 10 * MIB


def test_an_open_private_pool_serves_requests_also_of_play() -> None:
    device = allocator()
    pool = device.create_pool()
    device.free(device.malloc(2 * MIB))
    device.enter_pool(pool)
    device.play(*columns((Mem.ALLOC, 0, 2 * MIB, 0)))
    device.leave_pool()
    device.play(*columns((Mem.FREE, 0, 0, 0)))
    device.validate()
    assert [(segment.pool, len(segment.blocks)) for segment in device.segments()] == [("large", 1), ("large@1", 1)]
    device.empty_cache()
    assert [segment.pool for segment in device.segments()] == ["large@1"], "a living pool keeps its segments"
    device.delete_pool(pool)
    assert device.segments() == []


def test_a_pool_without_splits_hands_out_whole_segments() -> None:
    device = allocator()
    device.enter_pool(device.create_pool(no_split=True))
    assert device.malloc(512).size_bytes == 2 * MIB


def test_only_the_default_pool_borrows_from_pools_for_use_on_out_of_memory() -> None:
    device = allocator(capacity_bytes=20 * MIB)
    lender, other = device.create_pool(use_on_oom=True), device.create_pool()
    device.enter_pool(lender)
    device.free(device.malloc(20 * MIB))
    device.leave_pool()
    device.enter_pool(other)
    with pytest.raises(OutOfMemory):
        device.malloc(20 * MIB)
    device.leave_pool()
    assert device.malloc(20 * MIB).segment is not None


@pytest.mark.parametrize(("version", "flushed"), [("2.12", False), ("2.13", True)])
def test_an_out_of_memory_inside_a_private_pool_flushes_the_cache_from_2_13_on(version: str, flushed: bool) -> None:
    device = allocator(capacity_bytes=20 * MIB, version=version)
    device.free(device.malloc(20 * MIB))
    device.enter_pool(device.create_pool())
    if flushed:
        assert device.malloc(20 * MIB).address == SEGMENT_BASE
    else:
        with pytest.raises(OutOfMemory):
            device.malloc(20 * MIB)
    assert device.statistics.num_alloc_retries == flushed


def test_inside_a_private_pool_waiting_frees_are_recorded_later_before_2_13() -> None:
    told: list[str] = []
    device = CachingAllocator(
        AllocatorSettings(), 1 << 30, version="2.12", on_event=lambda what, event: told.append(what)
    )
    block = device.malloc(2 * MIB)
    device.record_stream(block, 1)
    device.enter_pool(device.create_pool())
    device.free(block)
    device.malloc(512)
    device.validate()
    assert (told, device.active_bytes) == ([], 2 * MIB + 512)
    device.leave_pool()
    device.malloc(512)
    assert (told, device.active_bytes) == (["record"], 1024)


@pytest.mark.parametrize("size", [40 * MIB, 45 * MIB, 46 * MIB, 400 * MIB])
def test_a_request_above_the_device_is_out_of_memory_in_expandable_segments_too(size: int) -> None:
    """A virtual range reaches to 1.125 times the device (45 of 40 MiB); memory without end needs a longer one."""
    settings = AllocatorSettings.parse("expandable_segments:True")
    device = CachingAllocator(settings, 40 * MIB, capacity_bytes=38 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        device.malloc(size)
    assert (caught.value.requested_bytes, caught.value.device_free_bytes) == (size, 38 * MIB)
    endless = CachingAllocator(settings, 40 * MIB, capacity_bytes=1 << 50)
    block = endless.malloc(size)
    assert endless.active_bytes == size
    endless.validate()
    endless.free(block)
    assert endless.malloc(size).address == block.address
