"""Fits of one's own points: known figures come back, with nothing left between predicted and measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from calibration.measure import activations, attention, collectives, copies, gemm, norms
from calibration.measure.points import FigurePoint, Point
from calibration.own.facts import DEFAULT_RATES, TITLES, catalogue_name, facts_of
from calibration.own.profile import fit_points, write_profile
from sim.cost.attention import AttentionForm
from sim.cost.collective import CollectiveForm
from sim.cost.copy import copy_cost
from sim.cost.figures import Figure, Figures
from sim.cost.gemm import GemmForm
from sim.cost.memory import MemoryForm
from sim.cost.model import CostModel
from sim.cost.own import load_own_profile
from sim.hardware.catalogue import find_gpu, gpu_names
from sim.program.kernels import Collective, Gemm, HostCopy, Kernel, Memory
from tests.unit.calibration_fixtures import FakeDevice, points_of

H100 = find_gpu("h100")
CUDA, CPU = FakeDevice(), FakeDevice("cpu", title="my CPU")
INFO = CUDA.info().as_dict()
EXACT = 1e-9
"""A residual of the search's last step, far below any clock's."""
GEMM = GemmForm(H100, 0.7, 3.0, 250.0, 4000.0, 0.6)
ATTENTION = AttentionForm(H100, 0.4, 9000.0, 0.5, 0.2, 0.9)


def figures(points: list[Point], info: dict[str, object] = INFO) -> dict[str, float]:
    """Fitted figures, after looking that nothing is left over."""
    _, result = fit_points(info, points)
    assert all(errors.p90 < EXACT for errors in result.errors.values()), result.errors
    return {name: figure.value for name, figure in result.figures.items()}


def test_the_constants_of_products_come_back() -> None:
    cases = [case for case in gemm.cases(CUDA) if case.work.dtype == "bf16"]  # type: ignore[union-attr]
    found = figures(points_of(cases, lambda work: GEMM.time(work).total_ns))
    expected = {
        "efficiency": 0.7,
        "tile_edge_cost": 3.0,
        "k_overhead": 250.0,
        "fixed_us": 4.0,
        "bandwidth_efficiency": 0.6,
    }
    assert found == pytest.approx({f"gemm.{name}": value for name, value in expected.items()}, rel=1e-7)


def test_each_dtype_of_products_has_constants_of_its_own() -> None:
    wide = replace(GEMM, efficiency=0.9)
    cases = [case for case in gemm.cases(CUDA) if case.work.dtype in ("bf16", "fp32")]  # type: ignore[union-attr]
    found = figures(points_of(cases, lambda w: (wide if w.dtype == "fp32" else GEMM).time(w).total_ns))
    assert (found["gemm.efficiency"], found["gemm.fp32.efficiency"]) == pytest.approx((0.7, 0.9))


def test_one_product_moves_the_rate_alone() -> None:
    (case, *_) = gemm.cases(CUDA)
    work = Gemm(8192, 8192, 8192)
    found = figures(points_of([replace(case, work=work)], lambda work: GEMM.time(work).total_ns))
    base = CostModel.for_gpu(H100).profile.figures
    assert {name: found[f"gemm.{name}"] for name in ("k_overhead", "tile_edge_cost")} == {
        name: base[f"gemm.{name}"] for name in ("k_overhead", "tile_edge_cost")
    }
    assert found["gemm.efficiency"] != base["gemm.efficiency"]


def test_the_constants_of_attention_come_back_each_way() -> None:
    found = figures(points_of(attention.cases(CUDA), lambda work: ATTENTION.time(work).total_ns))
    for generation in ("flash2", "efficient"):
        assert found[f"attention.{generation}.backward_rate_ratio"] == pytest.approx(0.9)
        for head_dim in (64, 128):
            root = f"attention.{generation}.d{head_dim}"
            values = [found[f"{root}.{n}"] for n in ("efficiency", "fixed_us", "bandwidth_efficiency", "tail_share")]
            assert values == pytest.approx([0.4, 9.0, 0.5, 0.2], rel=1e-6)


def test_passes_are_fitted_by_family_and_by_kernel() -> None:
    """Kernels of one family that differ keep their own figures; the model asks for those first."""
    gelu, other = MemoryForm(H100, 0.5, 4000.0), MemoryForm(H100, 0.8, 2000.0)
    cases = list(activations.cases(CUDA))
    points = [
        point
        for case in cases
        for point in points_of([case], lambda w, n=case.name: (gelu if n == "aten::gelu" else other).time(w).total_ns)  # type: ignore[misc]
    ]
    _, result = fit_points(INFO, points)
    names = ("aten::gelu", "aten::relu")
    assert [result.figures[f"memory.elementwise.{n}.bandwidth_efficiency"].value for n in names] == pytest.approx(
        [0.5, 0.8]
    )
    own = Figures("own", {**CostModel.for_gpu(H100).profile.figures.by_name, **result.figures})
    assert MemoryForm.of(own, H100, "elementwise", "aten::gelu").bandwidth_efficiency == pytest.approx(0.5)
    assert result.errors["memory.elementwise"].p90 > 0.1


def test_norms_come_back() -> None:
    form = MemoryForm(H100, 0.55, 6000.0)
    found = figures(points_of(norms.cases(CUDA), lambda work: form.time(work).total_ns))
    for family in ("norm_forward", "norm_backward"):
        assert found[f"memory.{family}.bandwidth_efficiency"] == pytest.approx(0.55)
        assert found[f"memory.{family}.fixed_us"] == pytest.approx(6.0)


def test_copies_come_back() -> None:
    values = {
        "fixed_us": 12.0,
        "host_to_device_gb_per_s": 50.0,
        "device_to_host_gb_per_s": 40.0,
        "pageable_fraction": 0.2,
    }
    own = Figures("own", {f"copy.{name}": Figure(value, "measured", "given") for name, value in values.items()})

    def ns(work: HostCopy) -> float:
        return copy_cost(own, work.bytes, work.direction, work.pinned).alone_ns

    assert figures(points_of(copies.cases(CUDA), ns)) == pytest.approx(
        {f"copy.{name}": value for name, value in values.items()}, rel=1e-6
    )


class Span:
    """Ranks of one node, or one rank on each of several."""

    def __init__(self, size: int, nodes: int = 1) -> None:
        self.size, self.nodes, self.ranks_per_node = size, nodes, size // nodes


def test_collectives_come_back() -> None:
    """Below 1 % at every size: two lines, found from several starts."""
    form = CollectiveForm.of(CostModel.for_gpu(H100).profile.figures, H100)

    def case(kind: str, size: int) -> collectives.Case:
        return collectives.case(Collective(kind, size, "", 8))  # type: ignore[arg-type]

    sizes = [1 << power for power in range(12, 31)]
    points = points_of(
        [case(kind, size) for kind in ("all_gather", "all_reduce") for size in sizes],
        lambda work: form.cost(work, Span(8)).alone_ns,
    )
    _, result = fit_points(INFO, points)
    own = CollectiveForm.of(Figures("own", {**form.figures.by_name, **result.figures}), H100)
    for kind in ("all_gather", "all_reduce"):
        for size in sizes:
            work = Collective(kind, size, "", 8)  # type: ignore[arg-type]
            assert own.cost(work, Span(8)).alone_ns == pytest.approx(form.cost(work, Span(8)).alone_ns, rel=0.01)


def test_hops_between_nodes_come_back() -> None:
    works = [Collective("all_gather", size, "", 4) for size in (1 << 16, 1 << 20, 1 << 26)]
    steps, gb_per_s, hop_us = 3, 40.0, 20.0

    def ns(work: Collective) -> float:
        return steps * hop_us * 1e3 + work.bytes * 3 / 4 / gb_per_s

    found = figures(points_of([collectives.case(work, nodes=4) for work in works], ns))
    fraction = gb_per_s * 1e9 / H100.node.network_bytes_per_s
    for protocol in ("low_latency", "bandwidth"):
        assert found[f"inter_node.{protocol}.hop_us"] == pytest.approx(hop_us)
        assert found[f"inter_node.{protocol}.nic_fraction"] == pytest.approx(fraction)


def test_what_is_read_off_becomes_a_figure_as_it_is() -> None:
    read = [
        FigurePoint("a", "host", "host.launch_us", 6.5),
        FigurePoint("b", "copies", "host_link.both_directions", 1.4),
        FigurePoint("c", "contention", "overlap.slowdown", 1.2, details={"taken": 24}),
        FigurePoint("d", "memory_use", "device.context_bytes", 500e6),
    ]
    found = figures([*read])
    assert found == {
        "host.launch_us": 6.5, "host_link.both_directions": 1.4, "overlap.slowdown": 1.2, "overlap.nccl_sms": 24.0,
    }  # fmt: skip


def test_a_written_profile_gives_measured_times_exactly_and_others_by_the_fit(tmp_path: Path) -> None:
    cases = [case for case in gemm.cases(CUDA) if case.work.dtype == "bf16"]  # type: ignore[union-attr]
    points = points_of(cases, lambda work: GEMM.time(work).total_ns)
    points.append(FigurePoint("d", "memory_use", "device.context_bytes", 500e6))
    write_profile(tmp_path / "mine.yaml", INFO, points)
    model = CostModel.for_gpu(H100, str(tmp_path / "mine.yaml"))
    for case in cases:
        assert isinstance(case.work, Gemm)
        assert model.kernel_ns(Kernel("aten::mm", case.work)) == round(GEMM.time(case.work).total_ns)
    other = Gemm(5000, 3000, 7000)
    assert model.kernel_ns(Kernel("aten::mm", other)) == pytest.approx(GEMM.time(other).total_ns, rel=1e-4)
    text = (tmp_path / "mine.yaml").read_text()
    assert '"context_bytes": 500000000' in text and '"gemm": {"points": 80, "median": 0.0, "p90": 0.0}' in text
    assert (tmp_path / "mine.plots" / "gemm.png").exists()
    assert not list(tmp_path.glob(".mine*"))


def test_a_cpu_has_facts_of_its_own_and_no_launch_queue(tmp_path: Path) -> None:
    """Its peak is its fastest product, its bandwidth its fastest large pass."""
    info = CPU.info().as_dict()
    products = points_of(gemm.cases(CPU), lambda work: work.flops / 50)  # 50 GFLOP/s
    passes = points_of(norms.cases(CPU), lambda work: work.bytes / 10)  # 10 GB/s
    facts = facts_of(info, [*products, *passes])  # type: ignore[list-item]
    assert (facts.gpu.peak_flops_per_s("fp32"), facts.gpu.memory_bandwidth_bytes_per_s) == pytest.approx((50e9, 10e9))
    write_profile(tmp_path / "cpu.yaml", info, [*products, *passes])
    model = CostModel.for_gpu(H100, str(tmp_path / "cpu.yaml"))
    assert (model.gpu.name, model.host.launch_ns, model.driver_call_ns("cuda_malloc")) == ("my CPU", 0, 0)
    work = Memory("norm_forward", 123_456_789)
    assert model.kernel_ns(Kernel("aten::native_layer_norm", work)) == pytest.approx(work.bytes / 10, rel=0.01)
    assert [model.contended_ns(Kernel("x", work), level) for level in (0, 2)] == [
        model.kernel_ns(Kernel("x", work))
    ] * 2
    assert load_own_profile(tmp_path / "cpu.yaml").gpus == ()


def test_small_products_say_nothing_of_a_cpus_peak() -> None:
    """Starting one may take a time slice: 16 ms for half a million operations are no 30 MFLOP/s."""
    small = points_of([gemm.case(Gemm(112, 64, 32, "fp32"))], lambda work: 16e6)
    assert facts_of(CPU.info().as_dict(), small).gpu.peak_flops_per_s("fp32") == DEFAULT_RATES[0]  # type: ignore[arg-type]
    large = points_of([gemm.case(Gemm(768, 768, 768, "fp32"))], lambda work: work.flops / 5)
    found = facts_of(CPU.info().as_dict(), [*small, *large])  # type: ignore[list-item]
    assert found.gpu.peak_flops_per_s("fp32") == pytest.approx(5e9, rel=1e-4)


UNTITLED = {"a100-pcie-40gb", "h100-96gb-hbm2e", "mi250x-gcd-64gb"}
"""Cards of the catalogue whose titles are not known for certain."""


def test_titles_of_torch_stand_for_the_catalogues_names() -> None:
    assert {name for _, name in TITLES} | UNTITLED == set(gpu_names())
    assert catalogue_name("NVIDIA B300 SXM6 AC") == "b300-sxm-288gb"
    assert catalogue_name("NVIDIA GB300") == "gb300-288gb"
    assert catalogue_name("NVIDIA GH200 144G HBM3e") == "gh200-144gb"
    assert (catalogue_name("NVIDIA H20"), catalogue_name("NVIDIA H200")) == ("h20-sxm-96gb", "h200-sxm-141gb")
    assert catalogue_name("NVIDIA H20-3e") is None
    assert catalogue_name("NVIDIA RTX 6000 Ada Generation") is None
    assert catalogue_name("NVIDIA RTX PRO 6000 Blackwell Workstation Edition") == "rtxpro6000-96gb"
    assert catalogue_name("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition") is None
    assert catalogue_name("NVIDIA A100-SXM4-80GB") == "a100-sxm-80gb"
    assert catalogue_name("NVIDIA GH200 480GB") == "gh200-96gb"
    assert catalogue_name("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert catalogue_name("Tesla T4") is None
