"""Tables, traces and figures say exactly what the timelines say."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow.parquet as parquet
import pytest

from sim.api import Outcome, Result, load, shown_lanes, simulate
from sim.program.program import COMPUTE, Mem
from sim.report.files import FILES
from sim.report.picture import picture_of, thinned
from sim.timeline.clock import host_clock, memory_clock, step_windows
from sim.timeline.export.names import collective_name
from sim.timeline.export.tables import kernel_table, memory_table
from sim.timeline.export.trace import Rank, trace_bytes
from tests.unit.scenarios import CHAIN, PIPELINE, TIGHT, TINY, sim, write

RANK = Rank(0, 2, "NVIDIA H100", 80 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Result:
    return simulate(load(write(folder, TINY, "tiny.yaml")))


@pytest.fixture(scope="module", params=["none", "full"])
def outcome(tiny: Result, request: pytest.FixtureRequest) -> Outcome:
    return tiny[request.param]


@pytest.fixture(scope="module")
def events(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.lanes is not None
    trace = json.loads(gzip.decompress(trace_bytes(outcome.memory, outcome.lanes, RANK)))
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


# -- the clock -------------------------------------------------------------------------------------------------------
def test_times_of_memory_events_never_fall(outcome: Outcome) -> None:
    assert outcome.lanes is not None
    clock = memory_clock(outcome.memory, outcome.lanes)
    assert (np.diff(clock.issue_ns) >= 0).all() and (np.diff(clock.device_ns) >= 0).all()
    assert (np.diff(host_clock(outcome.lanes)) >= 0).all()


def test_an_allocation_counts_from_the_start_of_a_kernel_and_a_free_from_an_end(outcome: Outcome) -> None:
    assert outcome.lanes is not None
    lanes, memory = outcome.lanes, outcome.memory
    times = memory_clock(memory, lanes).device_ns
    starts, ends = set(lanes.start_ns[lanes.computes]), set(lanes.end_ns[lanes.computes])
    is_alloc = memory.program.mem_kind == Mem.ALLOC
    assert set(times[is_alloc]) <= starts | {lanes.device_end_ns}
    assert set(times[~is_alloc]) <= starts | ends | {lanes.device_end_ns}


def test_steps_follow_each_other_and_the_last_is_the_steady_one(outcome: Outcome) -> None:
    assert outcome.lanes is not None and outcome.time is not None
    windows = step_windows(outcome.lanes)
    assert all(a[1] == b[0] for a, b in pairwise(windows))
    steady = windows[-1]
    assert outcome.cycle.period == 1
    assert steady[1] - steady[0] == outcome.time.step_ns


# -- tables ----------------------------------------------------------------------------------------------------------
def test_kernels_last_as_long_as_in_the_lanes(outcome: Outcome) -> None:
    lanes = outcome.lanes
    assert lanes is not None
    table = kernel_table(lanes)
    runs = lanes.is_kernel | lanes.is_collective
    assert np.array_equal(table["start_ns"].to_numpy(), lanes.start_ns[runs])
    assert np.array_equal(table["duration_ns"].to_numpy(), (lanes.end_ns - lanes.start_ns)[runs])
    assert np.array_equal(table["issue_ns"].to_numpy(), lanes.issue_ns[runs])


def test_live_blocks_sum_to_the_peak_at_the_peak(outcome: Outcome) -> None:
    assert outcome.lanes is not None
    rows = memory_table(outcome.memory, outcome.lanes).to_pylist()
    event = outcome.peak.event
    alive = [r for r in rows if r["alloc_event"] <= event and (r["free_event"] is None or event < r["free_event"])]
    assert sum(row["block_bytes"] for row in alive) == outcome.peak.bytes
    by_owner: dict[str, int] = defaultdict(int)
    for row in alive:
        by_owner[row["owner"]] += row["block_bytes"]
    assert by_owner == {owner.label: size for owner, size in outcome.owners.items()}


def test_what_outlives_the_run_has_no_free(outcome: Outcome) -> None:
    assert outcome.lanes is not None
    rows = memory_table(outcome.memory, outcome.lanes).to_pylist()
    left = [row for row in rows if row["free_event"] is None]
    assert sum(row["block_bytes"] for row in left) == outcome.memory.allocated_bytes[-1]
    assert all(row["free_issue_ns"] is None and row["free_device_ns"] is None for row in left)
    assert all(row["alloc_device_ns"] <= row["free_device_ns"] for row in rows if row["free_event"] is not None)


# -- trace -----------------------------------------------------------------------------------------------------------
def test_every_kernel_has_its_launch_and_its_arrow(events: list[dict[str, Any]], outcome: Outcome) -> None:
    kernels = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")}
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    lanes = outcome.lanes
    assert lanes is not None
    assert kernels.keys() == launches.keys() == set(np.flatnonzero(lanes.is_kernel | lanes.is_collective).tolist())
    assert [e["id"] for e in events if e["ph"] == "s"] == [e["id"] for e in events if e["ph"] == "f"] == [*kernels]
    for row, kernel in kernels.items():
        assert kernel["dur"] == pytest.approx((lanes.end_ns[row] - lanes.start_ns[row]) / 1e3, abs=2e-3)
        assert launches[row]["ts"] + launches[row]["dur"] <= kernel["ts"] + 2e-3


def test_slices_of_a_thread_nest(events: list[dict[str, Any]]) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start + 2e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3
            open_ends.append(end)


def test_steps_are_marked_as_the_profiler_marks_them(events: list[dict[str, Any]]) -> None:
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("Profiler")] == [
        "ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2",
    ]  # fmt: skip
    assert {"forward", "backward", "optimizer"} <= set(names)


def test_collectives_have_nccls_names(events: list[dict[str, Any]], outcome: Outcome) -> None:
    names = {event["name"] for event in events if event["name"].startswith("nccl")}
    assert "ncclDevKernel_AllGather_RING_LL" in names and "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL" in names
    assert names == {collective_name(collective) for collective in outcome.program.collectives}


def test_counters_reach_the_exact_peaks(events: list[dict[str, Any]], outcome: Outcome) -> None:
    counters = [event for event in events if event["ph"] == "C"]
    allocated = [event["args"]["bytes"] for event in counters if event["name"] == "allocated bytes"]
    reserved = [event["args"]["bytes"] for event in counters if event["name"] == "reserved bytes"]
    owned = [sum(event["args"].values()) for event in counters if event["name"] == "allocated bytes by owner"]
    assert max(allocated) == max(owned) == int(outcome.memory.allocated_bytes.max())
    assert allocated[-1] == owned[-1] == int(outcome.memory.allocated_bytes[-1])
    assert max(reserved) == int(outcome.memory.reserved_bytes.max())
    times = [event["ts"] for event in counters]
    assert times == sorted(times)


def test_every_thread_of_a_trace_has_a_name(events: list[dict[str, Any]]) -> None:
    named = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] == "X"} <= named


def test_the_same_run_gives_the_same_trace(outcome: Outcome) -> None:
    assert outcome.lanes is not None
    assert trace_bytes(outcome.memory, outcome.lanes, RANK) == trace_bytes(outcome.memory, outcome.lanes, RANK)


# -- pictures --------------------------------------------------------------------------------------------------------
def test_a_thinned_curve_keeps_peak_and_end() -> None:
    times, values = np.linspace(0, 1, 50_000), np.arange(50_000) % 977
    kept = thinned(times, values)
    assert len(kept) <= 2 * 2401
    assert values[kept].max() == 976 and kept[-1] == 49_999
    assert (np.diff(kept) > 0).all()


def test_a_picture_has_the_peak_and_one_lane_per_busy_stream(outcome: Outcome) -> None:
    picture = picture_of(outcome, shown_lanes(outcome))
    curve = np.sum(list(picture.owners.values()), axis=0)
    assert curve.max() == picture.peak_bytes == outcome.peak.bytes
    assert picture.times_ms[int(np.argmax(curve))] == picture.peak_ms
    assert [lane.name for lane in picture.lanes][:1] == ["compute"]
    assert {"forward", "backward"} <= picture.lanes[COMPUTE].work.keys()


def colours(path: Path) -> tuple[tuple[int, ...], int]:
    image = matplotlib.image.imread(path)
    return image.shape, len(np.unique(image.reshape(-1, image.shape[2]), axis=0))


def test_a_run_leaves_all_files_and_a_figure_that_shows_something(folder: Path, tmp_path: Path) -> None:
    assert sim("run", write(folder, TINY, "tiny.yaml"), "--out", tmp_path).exit_code == 0
    root = tmp_path / "tiny"
    assert sorted(path.name for path in root.iterdir()) == ["full", "none", "scenario.yaml", "summary.json"]
    for strategy in ("none", "full"):
        assert sorted(path.name for path in (root / strategy).iterdir()) == sorted(FILES)
        assert parquet.read_table(root / strategy / "kernels.parquet").num_rows > 100
        (height, width, _), count = colours(root / strategy / "timeline.png")
        assert (height > 500, width > 1000, count > 50) == (True, True, True)


def test_out_of_memory_leaves_all_files_too(folder: Path, tmp_path: Path) -> None:
    assert sim("run", write(folder, CHAIN, "chain.yaml"), "--out", tmp_path, "--set", TIGHT).exit_code == 0
    (changed,) = tmp_path.glob(f"chain@{TIGHT.replace(' ', '_')}-*")
    left = changed / "none"
    assert sorted(path.name for path in left.iterdir()) == sorted(FILES)
    rows = parquet.read_table(left / "memory.parquet").to_pylist()
    assert [row["block_bytes"] for row in rows] == [128 << 20] * 4
    assert all(row["free_event"] is None for row in rows)
    assert colours(left / "timeline.png")[1] > 50


def test_odd_names_become_folders(tmp_path: Path) -> None:
    odd = CHAIN.replace("none: ", '"a/b": ').replace("by-two:", '"../c d":')
    scenario = write(tmp_path, odd, "my run (2).yaml")
    assert sim("run", scenario, "--out", tmp_path / "out").exit_code == 0
    (run,) = (tmp_path / "out").glob("my_run_2_-*")
    assert sorted(path.name for path in run.iterdir()) == [
        "_c_d",
        "a_b",
        "scenario.yaml",
        "summary.json",
    ]


def test_a_failed_write_leaves_nothing_half_written(tmp_path: Path) -> None:
    from sim.report.files import write_atomically

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="disk"):
        write_atomically(path, lambda file: (file.write(b"new"), _fail()))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def _fail() -> None:
    raise OSError("disk")


# -- every rank ------------------------------------------------------------------------------------------------------
def test_every_send_of_a_pipeline_meets_its_receive(tmp_path: Path) -> None:
    """Arrows of both ranks' files agree: each begins once, ends once, and not before it begins."""
    scenario = write(tmp_path, PIPELINE, "pipe.yaml")
    assert sim("run", scenario, "--only", "1f1b", "--every-rank", "--out", tmp_path).exit_code == 0
    files = sorted((tmp_path / "pipe" / "1f1b" / "ranks").glob("*.json.gz"))
    assert [file.name for file in files] == ["rank0.json.gz", "rank2.json.gz"]
    arrows: dict[str, dict[int, float]] = {"s": {}, "f": {}}
    for file in files:
        trace = json.loads(gzip.decompress(file.read_bytes()))
        assert trace["distributedInfo"]["rank"] == int(file.name[4])
        for event in trace["traceEvents"]:
            if event.get("cat") == "pipeline":
                assert event["id"] not in arrows[event["ph"]]
                arrows[event["ph"]][event["id"]] = event["ts"]
    assert arrows["s"] and arrows["s"].keys() == arrows["f"].keys()
    assert all(arrows["f"][number] > begun for number, begun in arrows["s"].items())
    assert (files[0].parent / "rank2.pickle").stat().st_size > 1000
