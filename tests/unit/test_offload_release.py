"""How bytes that have left are freed: a slow link costs time with events, memory with record_stream."""

from __future__ import annotations

import pytest

from sim.api import Outcome, simulate_setup
from sim.scenario import ScenarioError, load_text

TEXT = """
model: {preset: llama-3.1-8b, layers: 8, implementation: torchtitan}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 4096}
parallel: {fsdp: {degree: 8}}
offload: {what: activations}
strategies:
  kept:    {offload: null}
  events:  {offload: {release: events}}
  records: {offload: {release: record_stream}}
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {setup.name: simulate_setup(setup) for setup in load_text(TEXT).strategies}


def test_nothing_waits_for_copies_that_leave_with_record_stream(outcomes: dict[str, Outcome]) -> None:
    waits = {name: outcomes[name].copies.out_wait_ns for name in ("events", "records")}  # type: ignore[union-attr]
    assert waits["events"] > 0
    assert waits["records"] == 0


def test_what_is_still_held_when_backward_asks_does_not_come_back(outcomes: dict[str, Outcome]) -> None:
    events, records = (outcomes[name].copies for name in ("events", "records"))
    assert events is not None and records is not None
    assert events.back_bytes < events.out_bytes == records.out_bytes == records.back_bytes


def test_bytes_on_their_way_are_memory_until_the_copy_is_through(outcomes: dict[str, Outcome]) -> None:
    peaks = {name: outcome.steady.active_bytes for name, outcome in outcomes.items()}
    assert peaks["events"] < peaks["records"]


def test_a_bound_on_copies_needs_events() -> None:
    with pytest.raises(ScenarioError, match="nothing waits for copies"):
        load_text(TEXT, overrides=["offload.in_flight=3"])


def test_release_is_about_side_streams() -> None:
    with pytest.raises(ScenarioError, match="needs streams: side"):
        load_text(TEXT.split("strategies:")[0], overrides=["offload={what: saved_tensors}", "offload.release=events"])
