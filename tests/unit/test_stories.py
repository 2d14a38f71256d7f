"""An allocation's life, told from a timeline."""

from __future__ import annotations

import pytest

import sim
from sim.program.program import Owner, Phase
from sim.scenario import load_text
from sim.timeline.stories import story

SCENARIO = """
model: {preset: llama-tiny, implementation: torchtitan}
cluster: {gpu: h100}
batch: {micro_batch: 1, seq_len: 512}
precision: {parameters: bf16, compute: bf16}
strategies:
  none: {}
  full: {checkpoint: {every: 1}}
"""


@pytest.fixture(scope="module")
def result() -> sim.Result:
    return sim.simulate(load_text(SCENARIO, "stories"))


def test_a_saved_activation_is_kept_for_its_own_backward(result: sim.Result) -> None:
    made = [s for s in result["none"].story("layers.2.feed_forward.w1") if s.made.phase is Phase.FORWARD]
    (output,) = [s for s in made if s.bytes == 512 * 1536 * 2]
    assert output.owner is Owner.ACTIVATION
    assert output.freed is not None
    assert output.freed.phase is Phase.BACKWARD
    assert (output.freed.path, output.freed.operator) == ("layers.2.feed_forward", "aten.silu (SiluBackward0)")


def test_under_a_checkpoint_it_dies_in_forward_and_is_made_again(result: sim.Result) -> None:
    told = [s for s in result["full"].story("layers.2.feed_forward.w1") if s.bytes == 512 * 1536 * 2]
    by_phase = {s.made.phase: s for s in told if s.owner in (Owner.ACTIVATION, Owner.RECOMPUTED)}
    first, again = by_phase[Phase.FORWARD], by_phase[Phase.RECOMPUTE]
    assert first.freed is not None and first.freed.phase is Phase.FORWARD
    assert again.freed is not None and again.freed.phase is Phase.BACKWARD
    assert again.owner is Owner.RECOMPUTED


def test_a_parameter_is_made_in_set_up_and_alive_at_the_end(result: sim.Result) -> None:
    outcome = result["none"]
    first = story(outcome.memory, 0)
    assert first.owner is Owner.PARAMETER
    assert first.made.step == -1
    assert first.freed is None
    assert str(first).endswith("alive at the end")


def test_all_strategies_tell_the_same_path(result: sim.Result) -> None:
    assert set(result.story("layers.0.attention.wq")) == {"none", "full"}
    assert result.story("layers.9") == {"none": [], "full": []}


def test_a_handle_that_never_was_is_an_error(result: sim.Result) -> None:
    with pytest.raises(IndexError):
        story(result["none"].memory, 10**6)
