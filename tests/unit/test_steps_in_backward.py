"""Steps inside backward under FSDP2: on the stream of the reduction, one parameter at a time."""

from __future__ import annotations

import pytest

from sim.api import simulate_setup
from sim.program.program import COMPUTE, REDUCE_SCATTER, Owner, Row
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.problems import ScenarioError

TEXT = """
model: {preset: llama-tiny, layers: 4}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 512}
parallel: {fsdp: {degree: 8}}
optimizer: {in_backward: true, clip_norm: null}
"""


def test_every_parameter_is_stepped_on_the_stream_that_reduced_its_gradient() -> None:
    program = record(load_text(TEXT, "steps").strategies[0], steps=1)
    steps = {
        int(stream)
        for kind, stream, argument in zip(program.row_kind, program.row_stream, program.row_argument)
        if kind == Row.LAUNCH and "adamw" in program.kernels[argument].name
    }
    assert steps == {REDUCE_SCATTER} and COMPUTE not in steps


def test_no_gradient_outlives_its_unit() -> None:
    """Alive at a time: at most the unit's own, before and after their reduction."""
    setups = (load_text(TEXT, "steps"), load_text(TEXT.replace("in_backward: true, ", ""), "steps"))
    inside, after = (simulate_setup(scenario.strategies[0]) for scenario in setups)
    curves = [outcome.worst.shown.owner_curves()[Owner.GRADIENT] for outcome in (inside, after)]
    assert curves[0].max() < curves[1].max()


def test_an_optimizer_on_the_cpu_steps_after_backward() -> None:
    with pytest.raises(ScenarioError, match="steps come after backward"):
        load_text(TEXT.replace("degree: 8", "degree: 8, cpu_offload: true"), "steps")
