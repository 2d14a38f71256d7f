"""DeepSpeed's ZeRO: the paper's closed forms, buckets, what overlaps (families: ZeRO-1, ZeRO-2, ZeRO-3)."""

from __future__ import annotations

from functools import cache

import pytest

from sim.api import Outcome, simulate_setup
from sim.checks.figures import GIB, figure_of
from sim.model.flops import parameter_count
from sim.program.program import Row
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.unit.scenario_texts import problems

RANKS = 8
SCENARIO = """
model: {preset: llama-small}
cluster: {gpu: a100-sxm-80gb, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 512}
precision: {parameters: bf16, compute: bf16, reduce: bf16}
parallel: {zero: {degree: 8, stage: 2, reduce_bucket_size: 20000000}}
"""


def setup(*overrides: str) -> Setup:
    return load_text(SCENARIO, "zero", overrides).strategies[0]


@cache
def play(*overrides: str) -> Outcome:
    return simulate_setup(setup(*overrides))


def held(outcome: Outcome, name: str) -> float:
    return figure_of(outcome, name) * GIB


@pytest.mark.parametrize("stage", [1, 2])
def test_st_zero_states_after_a_step_are_those_of_the_paper(stage: int) -> None:
    """Rajbhandari et al. 2020, figure 1: 2 psi + (4 + 8) psi / N beside gradients, which are gone after the step."""
    outcome = play(f"parallel.zero.stage={stage}")
    psi = parameter_count(outcome.setup.model)
    assert held(outcome, "parameters_after_step_gib") == pytest.approx(2 * psi, rel=0.005)
    assert held(outcome, "optimizer_after_step_gib") == pytest.approx(
        12 * psi / RANKS, rel=0.01
    )  # blocks are rounded up
    assert held(outcome, "gradients_after_step_gib") == 0


def test_st_zero_stage_3_holds_16_bytes_a_parameter_shared_by_the_ranks() -> None:
    """16 psi / N, gradients in 16 bit included: their buffer stays. Padding and small gathered parameters come on top."""
    outcome = play("parallel.zero.stage=3", "parallel.zero.persistence_threshold=0")
    psi = parameter_count(outcome.setup.model)
    buckets = 2 * 20_000_000
    for name, share in (("optimizer", 12), ("parameters", 2), ("gradients", 2)):
        assert held(outcome, f"{name}_after_step_gib") == pytest.approx(share * psi / RANKS, rel=0.02)  # rounded up
    assert outcome.steady.allocated_bytes > 16 * psi / RANKS + buckets


def test_stage_3_gathers_every_parameter_twice_unless_it_is_needed_again_soon() -> None:
    """Per step: forward and backward each gather what is not kept; small parameters stay."""

    def gathered(*overrides: str) -> int:
        program = record(setup("parallel.zero.stage=3", "parallel.zero.persistence_threshold=0", *overrides), 3)
        rows = [mark.rows for mark in program.marks if mark.name.endswith(".end")]
        kinds, numbers = program.row_kind[rows[1] : rows[2]], program.row_argument[rows[1] : rows[2]]
        issued = [program.collectives[n] for n in numbers[kinds == Row.COLLECTIVE].tolist()]
        return sum(c.bytes for c in issued if c.kind == "all_gather")

    psi = parameter_count(setup().model)
    assert gathered("parallel.zero.max_reuse_distance=0") == pytest.approx(2 * 2 * psi, rel=0.01)
    assert gathered() == pytest.approx(2 * psi, rel=0.01)  # all within max_reuse_distance: kept until backward ends


def test_stage_3_bounds_what_is_gathered() -> None:
    few, many = (
        play("parallel.zero.stage=3", "parallel.zero.max_reuse_distance=0", f"parallel.zero.{bound}")
        for bound in ("prefetch_bucket_size=0", "prefetch_bucket_size=200000000")
    )
    assert few.steady.allocated_bytes < many.steady.allocated_bytes
    assert few.time is not None and many.time is not None
    assert few.time.collectives["all_gather"] > many.time.collectives["all_gather"]


def test_st_zero_stage_1_keeps_whole_gradients_stage_2_a_part() -> None:
    """4 psi + 12 psi / N against 2 psi + 14 psi / N, with accumulation, where stage 1 sums after the last micro-batch.

    A parameter that only begins in the part is kept whole, and the step's gradients of the part are fp32 (4 psi / N).
    """
    one, two = (play(f"parallel.zero.stage={stage}", "batch.accumulation=2") for stage in (1, 2))
    psi = parameter_count(one.setup.model)
    embedding = 2 * 16384 * 1024
    assert held(one, "gradients_gib") >= 2 * psi * 0.99
    assert held(two, "gradients_gib") <= 4 * psi / RANKS + 4 * embedding


def test_every_rank_sums_all_gradients_once_a_step_and_gathers_the_parameters() -> None:
    for stage, count in ((1, 1), (2, 4)):
        time = play(f"parallel.zero.stage={stage}", "batch.accumulation=4").time
        assert time is not None
        assert time.collectives["all_gather"] == 1
        one = play(f"parallel.zero.stage={stage}").time
        assert one is not None
        sums = one.collectives["all_reduce"] - 2  # overflow and norm
        assert time.collectives["all_reduce"] - 2 == count * sums


def test_overlap_takes_a_second_buffer_and_less_time() -> None:
    alone, beside = play("batch.seq_len=2048"), play("batch.seq_len=2048", "parallel.zero.overlap_comm=true")
    assert alone.time is not None and beside.time is not None
    assert beside.time.step_ns < alone.time.step_ns
    assert beside.steady.reserved_bytes >= alone.steady.reserved_bytes


def test_a_larger_bucket_is_a_larger_buffer_and_fewer_sums() -> None:
    small, large = play(), play("parallel.zero.reduce_bucket_size=200000000")
    assert small.time is not None and large.time is not None
    assert large.time.collectives["all_reduce"] < small.time.collectives["all_reduce"]
    assert large.steady.reserved_bytes > small.steady.reserved_bytes


def test_sums_in_fp32_take_buffers_of_their_own() -> None:
    assert play("precision.reduce=fp32").steady.allocated_bytes > play().steady.allocated_bytes


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["parallel.fsdp={degree: 8}"], "is modelled alone, not with parallel.fsdp"),
        (["precision.parameters=fp32"], "ZeRO's model is in the dtype of compute"),
        (["parallel.zero.prefetch_bucket_size=1"], "is stage 3's: stage 2 gathers no parameters"),
        (["parallel.zero.degree=4"], "dp 4 = 4 ranks, but the cluster has 8 GPUs"),
        (["optimizer.master_weights=true"], "is modelled on one GPU only, not under zero"),
        (["model.frozen=[norm.*]"], "a flat parameter is trained whole: not modelled under zero"),
    ],
)
def test_what_is_not_modelled_is_refused(overrides: list[str], text: str) -> None:
    assert any(text in problem[2] for problem in problems(SCENARIO, overrides))


@pytest.mark.parametrize("stage", ["true", "0", "4", '"2"', "1.5"])
def test_a_stage_is_a_number_from_1_to_3(stage: str) -> None:
    found = problems(SCENARIO.replace("stage: 2", f"stage: {stage}"))
    assert [(path, "one of 1, 2, 3" in text) for _, path, text in found] == [("parallel.zero.stage", True)]
