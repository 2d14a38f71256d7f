"""An optimizer on the CPU beside parameters on the GPU: what it takes, when it runs, what it is refused with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.api import Outcome, simulate_setup
from sim.program.program import DEVICE_TO_HOST, Row
from sim.scenario import ScenarioError, load_text

TEXT = """
model: {preset: llama-3.2-1b, implementation: torchtitan, layers: 4}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 1024}
precision: {parameters: bf16, compute: bf16}
optimizer: {clip_norm: null}
strategies:
  plain:     {}
  states:    {optimizer: {offload: states}}
  ahead:     {optimizer: {offload: states}, host: {sync: []}}
  gradients: {optimizer: {offload: gradients}}
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {setup.name: simulate_setup(setup) for setup in load_text(TEXT).strategies}


def test_moments_are_not_on_the_device(outcomes: dict[str, Outcome]) -> None:
    """4 bytes less for every parameter that is large enough to leave."""
    parameters = 128256 * 2048 + 4 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    saved = outcomes["plain"].steady.allocated_bytes - outcomes["states"].steady.allocated_bytes
    assert saved == pytest.approx(4 * parameters, rel=2e-3)  # blocks keep what is too small to split


def test_gradients_and_parameters_cross_the_link_once(outcomes: dict[str, Outcome]) -> None:
    copies = outcomes["states"].copies
    assert copies is not None
    parameters = 128256 * 2048 + 4 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    assert copies.out_bytes == copies.back_bytes == 2 * parameters


def test_the_cpu_works_beside_backward_unless_the_loop_waits_for_the_loss(outcomes: dict[str, Outcome]) -> None:
    waits, ahead = (outcomes[name].time for name in ("states", "ahead"))
    assert waits is not None and ahead is not None
    backward_ns = ahead.step_ns
    assert ahead.step_ns < waits.step_ns < ahead.step_ns + backward_ns


def test_the_cpu_takes_the_time_of_its_traffic(outcomes: dict[str, Outcome]) -> None:
    """Seven tensors of two bytes for each parameter at 27.5 us a MiB; the rest of the step is short beside it."""
    time = outcomes["states"].time
    parameters = 128256 * 2048 + 4 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    assert time is not None
    assert time.step_ns > 14 * parameters / (1 << 20) * 27_500


def test_the_step_walks_parameters_in_the_order_in_which_gradients_left() -> None:
    from sim.runtime.record import record

    program = record(load_text(TEXT).strategies[1], steps=1)
    on_side = (program.row_kind == Row.COPY) & (program.row_stream == DEVICE_TO_HOST)
    copies = [program.copies[number] for number in program.row_argument[on_side]]
    out = [copy.bytes for copy in copies if copy.direction == "device_to_host"]
    assert out == [copy.bytes for copy in copies if copy.direction == "host_to_device"]


@pytest.mark.parametrize(
    "change, expected",
    [
        ("optimizer.clip_norm=1.0", "gradients leave before their norm is known"),
        ("optimizer.name=sgd", "is modelled for adamw alone"),
        ("optimizer.in_backward=true", "not with optimizer.in_backward"),
        ("batch.accumulation=2", "a gradient that has left cannot be added to"),
        ("optimizer.offload=nvme", "one of states, gradients"),
    ],
)
def test_what_it_is_not_modelled_with_is_refused(change: str, expected: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        load_text(TEXT.split("strategies:")[0], overrides=["optimizer.offload=gradients", change])
    assert expected in str(raised.value)


def test_over_several_gpus_it_is_refused_with_the_setting_that_is_meant() -> None:
    text = TEXT.split("strategies:")[0].replace("gpus_per_node: 1", "gpus_per_node: 2")
    for parallel, instead in (
        ("fsdp.degree=2", r"several have parallel\.fsdp\.cpu_offload"),
        ("zero={degree: 2, stage: 2}", r"DeepSpeed's is parallel\.zero\.offload_optimizer"),
        ("ddp.degree=2", "under DDP gradients would leave before they are summed"),
    ):
        with pytest.raises(ScenarioError, match=instead):
            load_text(text, overrides=["optimizer.offload=states", f"parallel.{parallel}"])


def test_it_goes_with_recomputation_and_offloaded_activations() -> None:
    setup = load_text(TEXT, overrides=["offload={what: activations}", "checkpoint=null"]).strategies[1]
    assert simulate_setup(replace(setup, name="both")).fits
