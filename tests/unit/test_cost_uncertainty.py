from __future__ import annotations

from math import hypot

import pytest

from sim.cost.figures import Figure, Figures, carry
from sim.cost.model import CostModel
from sim.program.kernels import Attention, Collective, Fixed, Gemm, Memory
from tests.unit.cost_fixtures import H100, Group, kernel

MODEL = CostModel.for_gpu(H100)
FIGURES = MODEL.profile.figures


def test_a_figure_without_a_sigma_takes_that_of_its_label() -> None:
    assert Figure(1.0, "published", "them").relative_sigma == 0.10
    assert Figure(1.0, "assumed", "nobody").relative_sigma == 0.30
    assert Figure(1.0, "assumed", "nobody", sigma=0.02).relative_sigma == 0.02


def test_carrying_a_figure_to_another_gpu_makes_it_less_certain() -> None:
    figure = Figure(1.0, "published", "them", "5 %", sigma=0.08)
    assert carry(figure, "a100").sigma == pytest.approx(hypot(0.08, 0.15))
    assert carry(figure, "a100", added_sigma=0.06).sigma == pytest.approx(hypot(0.08, 0.06))


def test_a_large_product_is_as_uncertain_as_its_rate_and_a_skinny_one_as_its_bytes() -> None:
    assert MODEL.uncertainty(Gemm(16_384, 16_384, 16_384)) == pytest.approx(FIGURES.sigma("gemm.efficiency"), rel=0.01)
    skinny = MODEL.uncertainty(Gemm(1, 32_768, 32_768))
    assert skinny == pytest.approx(FIGURES.sigma("gemm.bandwidth_efficiency"), rel=0.02)


def test_a_misaligned_product_is_less_certain() -> None:
    aligned, odd = (MODEL.uncertainty(Gemm(2048, 2048, k, batch=64)) for k in (2048, 2049))
    assert odd > aligned


def test_the_backward_of_attention_adds_its_own_uncertainty() -> None:
    works = [Attention(4, 32, 32, 8192, 8192, 128, causal=True, backward=b, generation="flash3") for b in (False, True)]
    forward, backward = map(MODEL.uncertainty, works)
    rate, ratio = (FIGURES.sigma(f"attention.flash3.{name}") for name in ("d128.efficiency", "backward_rate_ratio"))
    assert forward == pytest.approx(rate, rel=0.05)
    assert backward == pytest.approx(hypot(rate, ratio), rel=0.05)


def test_a_given_duration_is_certain() -> None:
    assert MODEL.uncertainty(Fixed(1000)) == 0


def test_every_kind_of_work_has_an_uncertainty_below_one() -> None:
    for work in (Gemm(64, 64, 64), Memory("norm_backward", 1 << 26), Memory("sort", 1 << 20)):
        assert 0 < MODEL.uncertainty(work) < 1
        assert MODEL.kernel_ns(kernel(work)) > 0
    assert 0 < MODEL.copy_uncertainty("device_to_host") < 1


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
@pytest.mark.parametrize("group", [Group(2), Group(8), Group(16, 2), Group(64, 8), Group(4, 4)])
def test_every_collective_has_an_uncertainty(kind: str, group: Group) -> None:
    for size_bytes in (1 << 10, 1 << 30):
        work = Collective(kind, size_bytes, "fsdp", group.size)  # type: ignore[arg-type]
        assert 0 < MODEL.collective_uncertainty(work, group) < 1
    assert MODEL.collective_uncertainty(Collective("all_gather", 1, "fsdp", 1), Group(1)) == 0


def test_a_large_gather_across_nodes_is_as_uncertain_as_what_bounds_it() -> None:
    work = Collective("all_gather", 8 << 30, "fsdp", 64)
    bound = dict(MODEL.collective(work, Group(64, 8)).parts)["bound"]
    name = "collective.all_gather.n8.bandwidth_gb_per_s" if bound == "node" else "inter_node.bandwidth.nic_fraction"
    assert MODEL.collective_uncertainty(work, Group(64, 8)) == pytest.approx(FIGURES.sigma(name), rel=0.05)


def test_figures_left_out_have_a_default_and_no_uncertainty() -> None:
    empty = Figures("mine", {})
    assert (empty.get("gemm.accumulate_rate", 1.0), empty.sigma("gemm.accumulate_rate")) == (1.0, 0.0)
