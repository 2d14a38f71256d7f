from __future__ import annotations

import pytest

from sim.cost.listing import ask_collective, ask_copy, ask_kernel, figure_rows, profile_rows
from sim.cost.model import CostModel
from sim.cost.profile import profile_names
from sim.program.kernels import Collective, Gemm
from tests.unit.cost_fixtures import H100, Group

MODEL = CostModel.for_gpu(H100)


def test_every_profile_is_listed_with_its_rate_and_labels() -> None:
    rows = profile_rows()
    assert [row.name for row in rows] == profile_names()
    for row in rows:
        assert 0.3 < row.gemm_efficiency < 1.1  # clocks of GeForce cards rise above the nominal boost
        assert 0 < row.gemm_sigma < 0.5
        assert (row.gemm_flops_per_s is None) == (row.gpus == ())
        assert {"flash2", "efficient", "triton", "math"} <= set(row.attention)
        assert sum(count for _, count in row.labels) > 100


def test_the_figures_of_a_profile_are_listed_with_their_evidence() -> None:
    rows = figure_rows(MODEL.profile, "gemm.")
    assert {row.name for row in rows} >= {"gemm.efficiency", "gemm.fixed_us", "gemm.fp8.k_overhead"}
    assert all(row.source and row.relative_sigma > 0 for row in rows)
    assert len(figure_rows(MODEL.profile)) == len(list(MODEL.profile.figures))


def test_a_question_about_a_product_is_answered_with_tiles_waves_and_bound() -> None:
    answer = ask_kernel(MODEL, Gemm(8192, 4096, 14_336))
    parts = answer.explanation.parts
    assert answer.explanation.bound == "tensor cores"
    assert (parts["tiles"], parts["waves"]) == (
        32 * 16 * 2 // (parts["tile_m"] * parts["tile_n"] // 32_768),
        parts["waves"],
    )
    assert answer.ns == answer.explanation.level_ns[0]
    assert answer.flops_per_s == pytest.approx(2 * 8192 * 4096 * 14_336 / answer.ns * 1e9)
    assert 0.6 < answer.peak_share < 0.9
    low, high = answer.range_ns
    assert low < answer.ns < high


def test_questions_about_collectives_and_copies_are_answered() -> None:
    gather = ask_collective(MODEL, Collective("all_gather", 1 << 30, "fsdp", 8), Group(8))
    assert dict(gather.parts)["protocol"] == "bandwidth"
    assert gather.ns == pytest.approx(gather.latency_ns + gather.bytes / gather.cap_bytes_per_s * 1e9, abs=1)
    copy = ask_copy(MODEL, 1 << 30, "host_to_device", pinned=False)
    assert dict(copy.parts)["memory"] == "pageable"
    assert copy.range_ns[0] < copy.ns < copy.range_ns[1]
