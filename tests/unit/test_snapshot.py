"""The snapshot is one that PyTorch's own viewer reads, and replays to the simulator's totals."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest

from sim.api import Outcome, device_bytes, load, shown_lanes, simulate_setup
from sim.engine import history
from sim.report import snapshot as module
from sim.report.snapshot import snapshot_bytes
from tests.unit.scenarios import CHAIN, TIGHT, TINY, write

EXPANDABLE = "allocator=expandable_segments:True"
STREAMED = "offload={what: activations, streams: side}"
CASES = {
    "two streams and FSDP": (TINY, (), "full"),
    "expandable segments": (TINY, (EXPANDABLE,), "none"),
    "side streams": (TINY, (STREAMED,), "none"),
    "out of memory": (CHAIN, (TIGHT,), "none"),
}


@pytest.fixture(scope="module", params=CASES)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    text, overrides, strategy = CASES[request.param]
    loaded = load(write(tmp_path_factory.mktemp("snapshot"), text), overrides)
    return simulate_setup(next(setup for setup in loaded.strategies if setup.name == strategy))


@pytest.fixture(scope="module")
def pickled(outcome: Outcome) -> bytes:
    return snapshot_bytes(outcome.setup, outcome.memory, shown_lanes(outcome)[0])


@pytest.fixture(scope="module")
def snapshot(pickled: bytes) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(pickled)
    return found


def test_it_is_a_pickle_of_protocol_4_with_plain_types(pickled: bytes) -> None:
    names = {opcode.name for opcode, _, _ in pickletools.genops(pickled)}
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ"}
    assert next(argument for opcode, argument, _ in pickletools.genops(pickled) if opcode.name == "PROTO") == 4


def test_its_entries_add_up_to_the_timeline(outcome: Outcome, snapshot: dict[str, Any]) -> None:
    """From an empty allocator: what is asked for, and what the driver gave, entry by entry; peaks and ends are equal."""
    requested: dict[int, int] = {}
    most_reserved = held = 0
    for entry in snapshot["device_traces"][0]:
        match entry["action"]:
            case "alloc":
                requested[entry["addr"]] = entry["size"]
            case "free_requested":
                assert requested[entry["addr"]] == entry["size"]
            case "free_completed":
                assert requested.pop(entry["addr"]) == entry["size"]
            case "segment_alloc" | "segment_map":
                held += entry["size"]
                most_reserved = max(most_reserved, held)
            case "segment_free" | "segment_unmap":
                held -= entry["size"]
    memory = outcome.memory
    assert most_reserved == memory.reserved_bytes.max()
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert held == memory.reserved_bytes[-1] == sum(segment["total_size"] for segment in snapshot["segments"])
    assert {b["address"]: b["requested_size"] for b in blocks if b["state"] != "inactive"} == requested
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == memory.allocated_bytes[-1]
    assert sum(segment["active_size"] for segment in snapshot["segments"]) == memory.active_bytes[-1]


def test_entries_say_who_and_where(outcome: Outcome, snapshot: dict[str, Any]) -> None:
    trace = snapshot["device_traces"][0]
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(times)
    allocations = [entry for entry in trace if entry["action"] == "alloc"]
    assert {"activations", "other"} & {entry["category"] for entry in allocations}
    assert all(entry["frames"][-1]["name"].startswith(("step ", "set-up")) for entry in trace)
    if not outcome.fits:
        assert outcome.memory.out_of_memory is not None
        assert trace[-1]["action"] == "oom"
        assert trace[-1]["device_free"] == outcome.memory.out_of_memory.device_free_bytes


def test_pytorch_reads_it(snapshot: dict[str, Any]) -> None:
    """Its text views and the page for the browser."""
    viz = pytest.importorskip("torch.cuda._memory_viz", reason="compares with PyTorch's own reader")
    assert "run:0:step 0;phase:0:forward;module:0:layers" in viz.segments(snapshot, format_flamegraph=lambda text: text)
    assert viz.memory(snapshot, format_flamegraph=lambda text: text)
    assert f"{len(snapshot['device_traces'][0])} entries" in viz.trace(snapshot) and viz.segsum(snapshot)
    assert "MemoryViz" in viz.trace_plot(snapshot) and viz.segment_plot(snapshot)


def test_a_long_run_keeps_the_last_entries(
    outcome: Outcome, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 4)
    short = pickle.loads(snapshot_bytes(outcome.setup, outcome.memory, shown_lanes(outcome)[0]))
    kept = short["device_traces"][0]
    assert 0 < len(kept) < len(snapshot["device_traces"][0])
    assert kept == snapshot["device_traces"][0][-len(kept) :]
    assert short["segments"] == snapshot["segments"]


def test_both_ways_to_the_history_agree(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played in one go, or event by event."""

    def recorded() -> history.History:
        total, capacity = device_bytes(outcome.setup)
        return history.record_history(
            outcome.memory, outcome.setup.allocator, total, capacity, outcome.setup.torch, 500
        )

    quick = recorded()
    monkeypatch.setattr(history, "_in_one_go", history._noted)
    assert quick == recorded()
