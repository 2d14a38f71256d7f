"""Pipelines in a scenario: what they become, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scenario import ScenarioError, load_text
from sim.scenario.parallel import Pipeline
from sim.scenario.pipeline import balanced
from sim.scenario.setup import Setup


def text(pipeline: str, *, layers: int = 8, micro_batches: int = 8, gpus: int = 4, more: str = "") -> str:
    return f"""
model: {{preset: gpt-tiny, implementation: nanogpt, layers: {layers}}}
cluster: {{gpu: h100, gpus_per_node: {gpus}}}
batch: {{micro_batch: 1, seq_len: 128, accumulation: {micro_batches}}}
precision: {{parameters: bf16, compute: bf16}}
parallel: {{pipeline: {pipeline}}}
{more}
"""


def only(*arguments: Any, **named: Any) -> Setup:
    return load_text(text(*arguments, **named), "mine.yaml").strategies[0]


def problems(*arguments: Any, **named: Any) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        load_text(text(*arguments, **named), "mine.yaml")
    return [f"{problem.path}: {problem.text}" for problem in caught.value.problems]


def test_the_default_is_1f1b_over_equal_stages() -> None:
    setup = only("{degree: 4}")
    assert setup.pipeline == Pipeline(degree=4, schedule="1f1b", chunks=1, placement=(2, 2, 2, 2))
    assert setup.mesh.dimensions == (("pp", 4),)


def test_stages_are_outermost_in_the_mesh() -> None:
    setup = only("{degree: 2}, fsdp: {degree: 2, replicas: 2}", gpus=8)
    assert setup.mesh.dimensions == (("pp", 2), ("replicate", 2), ("fsdp", 2))
    assert setup.data_parallel == 4


@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first", "zb-v", "dualpipe-v"])
def test_schedules_of_several_stages_per_rank_have_two(schedule: str) -> None:
    pipeline = only(f"{{degree: 4, schedule: {schedule}}}").pipeline
    assert pipeline is not None
    assert (pipeline.chunks, len(pipeline.placement)) == (2, 8)


def test_what_is_left_over_goes_to_later_stages() -> None:
    assert balanced(9, 4) == (2, 3, 2, 2)
    assert balanced(11, 4) == (2, 3, 3, 3)
    assert balanced(7, 4) == (1, 2, 2, 2)


def test_a_placement_is_taken_as_it_is() -> None:
    pipeline = only("{degree: 4, placement: [1, 2, 2, 3]}").pipeline
    assert pipeline is not None
    assert pipeline.placement == (1, 2, 2, 3)


@pytest.mark.parametrize(
    ("pipeline", "named", "problem"),
    [
        ("{degree: 4, placement: [2, 2, 4]}", {}, "parallel.pipeline.placement: 3 entries, but there are 4 stages"),
        ("{degree: 4, placement: [2, 2, 2, 3]}", {}, "parallel.pipeline.placement: 9 layers, but the model has 8"),
        ("{degree: 4}", {"layers": 3}, "parallel.pipeline.degree: 4 stages are more than the model's 3 layers"),
        (
            "{degree: 4, placement: [4, 0, 2, 2]}", {},
            "parallel.pipeline.placement: only the first and the last stage can be without layers",
        ),
        (
            "{degree: 4, virtual: 2}", {},
            "parallel.pipeline.virtual: 1f1b has 1 stage per rank: interleaved takes any number",
        ),
        ("{degree: 4, schedule: zb-v, virtual: 3}", {}, "parallel.pipeline.virtual: zb-v has 2 stages per rank"),
        (
            "{degree: 4, schedule: interleaved}", {"micro_batches": 3},
            "batch.accumulation: interleaved needs at least as many micro-batches as ranks (4)",
        ),
        (
            "{degree: 4, schedule: interleaved}", {"micro_batches": 9},
            "batch.accumulation: 9 micro-batches cannot go in 2 equal rounds: take a multiple of 4",
        ),
        (
            "{degree: 4, schedule: dualpipe-v}", {"micro_batches": 7},
            "batch.accumulation: dualpipe-v needs at least 8 micro-batches (2 per rank)",
        ),
        (
            "{degree: 4, schedule: zb-h1}", {"more": "checkpoint: {every: 1}"},
            "parallel.pipeline.schedule: splits backwards, which is not modelled together with checkpoint",
        ),
        ("{degree: 2}", {}, "parallel: pp 2 = 2 ranks, but the cluster has 4 GPUs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(pipeline: str, named: dict[str, Any], problem: str) -> None:
    path, _, message = problem.partition(": ")
    found = problems(pipeline, **named)
    assert any(one.startswith(path) and message in one for one in found), found


def test_models_that_nobody_cuts_are_refused() -> None:
    wrong = text("{degree: 4}").replace("nanogpt", "transformers")
    with pytest.raises(ScenarioError, match="transformers models are not cut into stages: take one of torchtitan"):
        load_text(wrong, "mine.yaml")


def test_an_unknown_schedule_gets_the_nearest_name() -> None:
    assert any("did you mean 1f1b?" in problem for problem in problems("{degree: 4, schedule: 1f1}"))


MEGATRON = """
model: {preset: gpt-tiny, implementation: megatron, layers: 8}
cluster: {gpu: a100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 128, accumulation: 8}
precision: {parameters: bf16, compute: bf16}
parallel: {tensor: {degree: 2, sequence_parallel: SPLIT}, pipeline: {degree: 4, PIPELINE}}
"""


def megatron(pipeline: str, split: str = "false") -> str:
    return MEGATRON.replace("SPLIT", split).replace("PIPELINE", pipeline)


@pytest.mark.parametrize(
    ("pipeline", "overlaps"),
    [
        ("schedule: 1f1b", False),
        ("schedule: interleaved", True),
        ("schedule: interleaved, overlap_p2p: false", False),
        ("schedule: zb-h1", True),
    ],
)
def test_megatron_waits_for_what_1f1b_sends(pipeline: str, overlaps: bool) -> None:
    resolved = load_text(megatron(pipeline)).strategies[0].pipeline
    assert resolved is not None
    assert (resolved.overlap_p2p, resolved.scatter_gather) == (overlaps, False)


@pytest.mark.parametrize(
    ("pipeline", "split", "problem"),
    [
        (
            "schedule: 1f1b, overlap_p2p: true",
            "false",
            "is a choice of interleaved: 1f1b always waits for what it sends",
        ),
        (
            "schedule: zb-h1, overlap_p2p: false",
            "false",
            "is a choice of interleaved: zb-h1 never waits for what it sends",
        ),
        ("scatter_gather: true", "true", "with sequence parallelism a rank has its own tokens only"),
    ],
)
def test_ways_to_send_that_megatron_does_not_have(pipeline: str, split: str, problem: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_text(megatron(pipeline, split))
    assert [problem in one.text for one in caught.value.problems] == [True]


def test_ways_to_send_are_megatrons() -> None:
    found = problems("{degree: 4, overlap_p2p: false, scatter_gather: true}")
    assert found == [
        "parallel.pipeline.overlap_p2p: only implementation megatron is written for it",
        "parallel.pipeline.scatter_gather: only implementation megatron is written for it",
    ]


def test_one_tensor_rank_has_no_shares_to_send() -> None:
    alone = megatron("scatter_gather: true").replace("{degree: 2, sequence_parallel: false}", "{degree: 1}")
    scenario = load_text(alone.replace("gpus_per_node: 8", "gpus_per_node: 4"))
    assert [warning.endswith("has no effect without tensor parallelism") for warning in scenario.warnings] == [True]
    pipeline = scenario.strategies[0].pipeline
    assert pipeline is not None and not pipeline.scatter_gather
