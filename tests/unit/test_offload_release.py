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


def test_every_layer_says_how_long_its_copies_take_beside_its_forward(outcomes: dict[str, Outcome]) -> None:
    """All but the last layer, all alike; a link that is slower than compute is what makes the step wait."""
    copies = outcomes["events"].copies
    assert copies is not None
    assert [layer.path for layer in copies.layers] == [f"layers.{number}" for number in range(7)]
    ratios = [layer.over_compute for layer in copies.layers]
    assert min(ratios) > 1
    assert max(ratios) < 1.2 * min(ratios)  # kernels are slower beside gathers and copies
    assert sum(layer.out_ns for layer in copies.layers) == pytest.approx(copies.out_busy_ns, rel=1e-3)


def test_a_faster_link_has_a_smaller_ratio_and_hides() -> None:
    overrides = ["cluster.gpu=gh200-96gb", "cluster.gpus_per_node=1", "cluster.nodes=8"]
    setup = load_text(TEXT, overrides=overrides).strategies[1]
    copies = simulate_setup(setup).copies
    assert copies is not None
    assert max(layer.over_compute for layer in copies.layers) < 1
    assert copies.out_wait_ns == 0


def test_the_report_and_the_picture_say_the_ratio(outcomes: dict[str, Outcome]) -> None:
    from sim.report.offload_summary import summarize_offload
    from sim.report.picture import picture_of

    outcome = outcomes["events"]
    summary = summarize_offload(outcome)
    assert summary is not None and summary.copy_over_compute is not None
    assert list(summary.copy_over_compute) == [f"layers.{number}" for number in range(7)]
    lanes = outcome.worst.lanes
    assert lanes is not None
    assert picture_of(outcome, [lanes]).copy_over_compute == max(summary.copy_over_compute.values())
