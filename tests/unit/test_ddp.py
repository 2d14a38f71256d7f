"""DistributedDataParallel: buckets, their order, what they hold, and what overlaps (family: DDP)."""

from __future__ import annotations

import pytest

from sim.api import simulate_setup
from sim.checks.figures import GIB, figure_of
from sim.model.build import build_model
from sim.model.flops import parameter_count
from sim.program.program import COMPUTE, DATA, Row
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.unit.scenario_texts import problems

SCENARIO = """
model: {preset: llama-small}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 512}
parallel: {ddp: {degree: 8}}
"""
PARAMETER_BYTES = 4  # fp32


def setup(*overrides: str) -> Setup:
    return load_text(SCENARIO, "ddp", overrides).strategies[0]


def all_reduces(*overrides: str, step: int = 3) -> list[int]:
    """Bytes of a step's all-reduces, in order."""
    program = record(setup(*overrides), step + 1)
    rows = [mark.rows for mark in program.marks if mark.name.endswith(".end")]
    begin = rows[step - 1] if step else 0
    issued = program.row_argument[begin : rows[step]]
    kinds = program.row_kind[begin : rows[step]]
    found = [program.collectives[n] for n in issued[kinds == Row.COLLECTIVE].tolist()]
    return [c.bytes for c in found if c.kind == "all_reduce"]


def test_a_bucket_closes_once_it_holds_its_cap_the_first_at_one_mib() -> None:
    model_bytes = PARAMETER_BYTES * parameter_count(setup().model)
    buckets = all_reduces()
    assert sum(buckets) == model_bytes
    assert all(size >= 25 << 20 for size in buckets[1:-1]) and buckets[0] >= 1 << 20


def test_a_larger_cap_makes_fewer_buckets_and_one_holds_everything() -> None:
    counts = [len(all_reduces(f"parallel.ddp.bucket_cap={cap}")) for cap in ("1 MiB", "25 MiB", "100 MiB", "100 GiB")]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 1


def test_gradients_are_summed_for_every_micro_batch_or_once() -> None:
    once = all_reduces()
    accumulate = "batch.accumulation=4"
    assert all_reduces(accumulate) == 4 * once
    assert all_reduces(accumulate, "parallel.ddp.gradient_sync=last") == once


def test_views_save_one_copy_of_the_gradients() -> None:
    """Gradients and buckets are two copies; with views a gradient outside its bucket lives only until it is copied in."""
    copies, views = (
        figure_of(simulate_setup(setup(f"parallel.ddp.gradient_as_bucket_view={view}")), "gradients_gib") * GIB
        for view in ("false", "true")
    )
    model_bytes = PARAMETER_BYTES * parameter_count(setup().model)
    largest = PARAMETER_BYTES * 16384 * 1024  # the head's, or the embedding's
    assert copies == pytest.approx(2 * model_bytes, rel=0.01)  # blocks are rounded up
    assert model_bytes < views <= 1.01 * (model_bytes + largest)


def test_sums_run_beside_backward_on_a_stream_of_their_own() -> None:
    outcome = simulate_setup(setup("batch.seq_len=4096"))
    assert outcome.lanes is not None and outcome.time is not None
    lanes = outcome.lanes
    sums = (lanes.program.row_kind == Row.COLLECTIVE) & (lanes.program.row_stream == DATA)
    computes = lanes.computes & (lanes.program.row_stream == COMPUTE)
    first, last = lanes.start_ns[sums].min(), lanes.end_ns[computes].max()
    assert first < last
    one = simulate_setup(setup("batch.seq_len=4096", "parallel.ddp.bucket_cap=100 GiB"))
    assert one.time is not None and outcome.time.step_ns < one.time.step_ns


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["parallel.fsdp={degree: 8}"], "is modelled alone, not with parallel.fsdp"),
        (["parallel.pipeline={degree: 8}"], "is modelled alone, not with parallel.pipeline"),
        (["mode=no_grad"], "under ddp only training is modelled"),
        (["optimizer={in_backward: true, clip_norm: null}"], "is modelled on one GPU only, not under ddp"),
        (["model.loss_chunks=4"], "a backward per chunk is modelled on one GPU only: under ddp use projection"),
        (
            ["parallel.ddp.static_graph=true", "parallel.ddp.gradient_sync=last", "batch.accumulation=2"],
            "fails in PyTorch without a sum in the first iteration",
        ),
        (["model={preset: gpt-tiny, implementation: megatron}"], "implementation megatron has its own: parallel.data"),
        (["parallel.ddp.degree=4"], "dp 4 = 4 ranks, but the cluster has 8 GPUs"),
    ],
)
def test_what_is_not_modelled_with_it_is_refused(overrides: list[str], text: str) -> None:
    assert any(text in problem[2] for problem in problems(SCENARIO, overrides))


def test_a_static_graph_sums_at_the_end_then_in_one_bucket_then_in_buckets() -> None:
    """A first iteration that only counts; in the second the order of arrival is seen; so the third has new buckets."""
    static = "parallel.ddp.static_graph=true"
    model_bytes = PARAMETER_BYTES * parameter_count(setup().model)
    first, second, third = (all_reduces(static, step=step) for step in (0, 1, 2))
    used = 4 * len(build_model(setup().model).parameters())  # type: ignore[arg-type]
    assert (first, second, third) == ([used, model_bytes], [model_bytes], all_reduces())


@pytest.mark.parametrize("preset", ["llama-tiny", "gpt-tiny"])
def test_a_static_graph_clones_logits_that_no_gradient_reaches(preset: str) -> None:
    """transformers' models return loss and logits; only the loss goes back. All that is trained is summed all the same."""
    text = SCENARIO.replace("llama-small", f"{preset}, implementation: transformers")
    static = load_text(text, "ddp", ["parallel.ddp.static_graph=true", "batch.accumulation=2"]).strategies[0]
    programs = [record(s, 1) for s in (static, load_text(text, "ddp").strategies[0])]
    static_bytes, plain_bytes = (
        [c.bytes for c in program.collectives if c.kind == "all_reduce" and c.dtype == "fp32"] for program in programs
    )
    assert static_bytes and sum(plain_bytes) == static_bytes[0]


def test_one_micro_batch_has_nothing_to_put_off() -> None:
    (warning,) = load_text(SCENARIO, "ddp", ("parallel.ddp.gradient_sync=last",)).warnings
    assert "has no effect: a step has one micro-batch" in warning
