from __future__ import annotations

import pytest

from sim.cost.copy import copy_cost
from sim.cost.figures import CostError
from sim.cost.memory import MemoryForm
from sim.cost.overlap import OverlapForm
from sim.cost.profile import load_profile, profile_names
from sim.program.kernels import Attention, Fixed, Gemm, Memory
from tests.unit.cost_fixtures import A100, H100, TEN_SMS

FAMILIES = (
    *("elementwise", "norm_forward", "norm_backward", "softmax", "reduce", "embedding"),
    *("copy", "optimizer", "fill", "sort", "dropout", "cross_entropy", "fused_softmax"),
)
PRODUCT = Gemm(4096, 4096, 4096)
FUSED = Attention(1, 32, 8, 4096, 4096, 128, causal=True, backward=False)


def test_a_memory_bound_kernel_takes_its_bytes_over_its_share_of_bandwidth() -> None:
    time = MemoryForm(gpu=TEN_SMS, bandwidth_efficiency=0.8, fixed_ns=3000.0).time(Memory("elementwise", 1_600_000))
    assert time.total_ns == pytest.approx(3000 + 1_600_000 / 800, rel=1e-12)


def test_an_empty_memory_kernel_takes_its_fixed_time() -> None:
    assert MemoryForm(TEN_SMS, 0.8, 3000.0).time(Memory("fill", 0)).total_ns == 3000


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_share_below_the_datasheet_bandwidth(profile: str, family: str) -> None:
    form = MemoryForm.of(load_profile(profile).figures, H100, family)
    assert 0 < form.bandwidth_efficiency < 1
    assert form.fixed_ns > 0


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(CostError, match=r"did you mean elementwise\?"):
        MemoryForm.of(load_profile("h100-sxm").figures, H100, "elemntwise")


def test_the_a100_residual_add_of_the_table_comes_within_its_family() -> None:
    # The elementwise share is a mean of add (.87) and gelu (.73, .80): an add of 1 GB comes out 9 % slow.
    ns = (
        MemoryForm.of(load_profile("a100-sxm-80").figures, A100, "elementwise")
        .time(Memory("elementwise", 10**9))
        .total_ns
    )
    assert ns / (7_500 + 1e9 / (0.87 * 2039)) == pytest.approx(0.87 / 0.80, rel=0.02)


def test_a_copy_is_a_latency_and_a_flow_over_the_host_link() -> None:
    cost = copy_cost(load_profile("a100-sxm-80").figures, 100_000_000, "host_to_device")
    assert (cost.latency_ns, cost.bytes, cost.cap_bytes_per_s) == (10_000, 100_000_000, 25.8e9)
    assert cost.alone_ns == pytest.approx(10_000 + 1e8 / 25.8, rel=1e-12)


def test_pageable_memory_copies_at_a_fifth() -> None:
    figures = load_profile("h100-sxm").figures
    pinned, pageable = (copy_cost(figures, 1 << 30, "device_to_host", pinned=p).cap_bytes_per_s for p in (True, False))
    assert pageable == pytest.approx(pinned / 5, rel=1e-12)


def test_compute_beside_a_collective_slows_as_the_rule_says() -> None:
    h100 = OverlapForm.of(load_profile("h100-sxm").figures, H100)
    a100 = OverlapForm.of(load_profile("a100-sxm-80").figures, A100)
    for work in (PRODUCT, FUSED, Memory("elementwise", 1 << 20)):
        assert h100.factor(work, 2) == pytest.approx(1 + 1.67 * 24 / 108, rel=1e-12)
        assert a100.factor(work, 2) == pytest.approx(1 + 24 / 84, rel=1e-12)


def test_a_copy_engine_slows_only_memory_bound_kernels_and_lightly() -> None:
    form = OverlapForm.of(load_profile("h100-sxm").figures, H100)
    assert form.factor(PRODUCT, 1) == form.factor(FUSED, 1) == 1
    assert form.factor(Memory("elementwise", 1 << 20), 1) == pytest.approx(1 / (1 - 55.63 / 3350), rel=1e-12)


def test_a_given_duration_stays_as_given_at_every_level() -> None:
    form = OverlapForm.of(load_profile("h100-sxm").figures, H100)
    assert [form.factor(Fixed(1000), level) for level in (0, 1, 2)] == [1, 1, 1]


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="contention level 3"):
        OverlapForm.of(load_profile("h100-sxm").figures, H100).factor(PRODUCT, 3)
