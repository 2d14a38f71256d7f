"""A step that is repeated by shifting is the step that recording gives."""

from __future__ import annotations

import pytest

from sim.runtime.extend import cut, extend
from sim.runtime.record import record
from tests.exact.test_stamps import CHECKPOINTS, GPT, LLAMA, assert_equal, setup_of

CHAIN = "model: {chain: {layers: 6, entry: 1 MiB, activation: 8 MiB, forward: 20 us, backward: 40 us}}\n"
CASES = {
    "llama": LLAMA.replace("IMPLEMENTATION", "torchtitan"),
    "llama, gradients zeroed at the start": LLAMA.replace("IMPLEMENTATION", "torchtitan")
    + "optimizer: {name: adamw, variant: foreach, zero_grad: start}\n",
    "transformers": LLAMA.replace("IMPLEMENTATION", "transformers"),
    "gpt": GPT.replace("DROPOUT", "0.1"),
    "chain": CHAIN,
}


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("case", CASES)
def test_repeating_the_third_step_equals_recording_more(case: str, checkpoint: str) -> None:
    if case == "chain" and checkpoint == "selective":
        pytest.skip("a chain has no operators to select")
    setup = setup_of(CASES[case] + f"checkpoint: {CHECKPOINTS[checkpoint]}\n")
    five = record(setup, 5)
    assert_equal(extend(record(setup, 3), 5), five)
    assert_equal(cut(five, 3), record(setup, 3))
