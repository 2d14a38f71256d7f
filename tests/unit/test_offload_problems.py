"""Offload that cannot be: what the border says."""

from __future__ import annotations

import pytest

from tests.unit.test_scenario_problems import VALID, problems


@pytest.mark.parametrize(
    ("offload", "checkpoint", "path", "says"),
    [
        ("{what: checkpoint_inputs}", "null", "offload.what", "nothing is checkpointed"),
        ("{what: saved_tensors, streams: side}", "null", "offload.streams", "save_on_cpu copies in the compute stream"),
        ("{what: activations, streams: compute}", "null", "offload.streams", "activations leave on side streams"),
        ("{what: activations, pinned: false}", "null", "offload.pinned", "side streams need pinned memory"),
        ("{what: saved_tensors, look_ahead: 2}", "null", "offload.look_ahead", "needs streams: side"),
        ("{what: checkpoint_inputs, in_flight: 2}", "{}", "offload.in_flight", "needs streams: side"),
        ("{what: saved_tensors, above: 1 MiB}", "null", "offload.above", "needs streams: side"),
        (
            "{what: saved_tensors, pinned: false, pinned_pool: true}",
            "null",
            "offload.pinned_pool",
            "no pinned memory to keep",
        ),
        ("{what: activations, layers: [0, 9]}", "null", "offload.layers[1]", "layers are 0 to 3"),
        ("{what: activations, layers: half}", "null", "offload.layers", "ratio 0.5"),
        ("{what: activations, layers: ratio 2}", "null", "offload.layers", "ratio 0.5"),
        ("{what: everything}", "null", "offload.what", "one of"),
        ("{layers: all}", "null", "offload.what", "is missing"),
        ("{what: activations, speed: 3}", "null", "offload.speed", "no such setting"),
    ],
)
def test_offload_that_cannot_be_is_a_problem(offload: str, checkpoint: str, path: str, says: str) -> None:
    found = problems(VALID.replace("strategies:", f"checkpoint: {checkpoint}\noffload: {offload}\nstrategies:", 1))
    assert any(at == path and says in text for _, at, text in found), found


def test_a_chain_has_nothing_to_offload() -> None:
    chain = "model: {chain: {layers: 2, entry: 1 MiB, activation: 1 MiB, forward: 1 ms, backward: 1 ms}}\n"
    assert "a chain has no tensors to offload" in problems(chain + "offload: {what: activations}\n")[0][2]
