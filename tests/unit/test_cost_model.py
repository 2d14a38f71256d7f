from __future__ import annotations

from dataclasses import replace

import pytest

from sim.cost.figures import CostError, Figure
from sim.cost.host import framework_names
from sim.cost.model import CostModel
from sim.cost.profile import flatten, load_profile, profile_for, profile_names
from sim.hardware.catalogue import find_gpu, gpu_names
from sim.program.kernels import Attention, Collective, Fixed, Gemm, HostWork, Memory
from tests.unit.cost_fixtures import A100, H100, FakeGpu, Group, kernel

MODEL = CostModel.for_gpu(H100)
KERNELS = (
    kernel(Gemm(8192, 4096, 4096)),
    kernel(Gemm(128, 128, 64, batch=64)),
    kernel(Attention(1, 32, 8, 4096, 4096, 128, causal=True, backward=True)),
    kernel(Memory("norm_backward", 1 << 26)),
    kernel(Fixed(12_345)),
    kernel(Fixed(0)),
)


def test_durations_are_whole_nanoseconds_and_never_shrink_with_contention() -> None:
    for each in KERNELS:
        levels = [MODEL.contended_ns(each, level) for level in (0, 1, 2)]
        assert all(type(ns) is int for ns in levels)
        assert levels[0] == MODEL.kernel_ns(each)
        assert levels == sorted(levels)
        assert (levels[0] == 0) == (levels[2] == 0)


def test_a_given_duration_is_returned_as_given() -> None:
    assert MODEL.kernel_ns(kernel(Fixed(12_345))) == 12_345


def test_equal_work_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, priced = CostModel.for_gpu(H100), []
    original = CostModel._time
    monkeypatch.setattr(CostModel, "_time", lambda self, work, name: priced.append(work) or original(self, work, name))
    assert model.kernel_ns(kernel(Gemm(512, 512, 512))) == model.kernel_ns(kernel(Gemm(512, 512, 512)))
    assert priced == [Gemm(512, 512, 512)]


def test_an_explanation_adds_up_and_names_its_figures() -> None:
    explanation = MODEL.explain(KERNELS[0])
    parts = explanation.parts
    assert (explanation.form, explanation.bound) == ("gemm", "tensor cores")
    assert explanation.level_ns[0] == round(parts["fixed_ns"] + max(parts["tensor_ns"], parts["memory_ns"]))
    assert explanation.figures["gemm.efficiency"].label == "assumed"
    assert not any(name.startswith(("memory.", "collective.")) for name in explanation.figures)
    assert MODEL.explain(KERNELS[2]).form == "attention"
    assert MODEL.explain(KERNELS[3]).form == "memory: norm_backward"
    assert MODEL.explain(KERNELS[4]).form == "fixed"


@pytest.mark.parametrize("name", profile_names())
def test_every_figure_of_a_profile_has_a_label_and_a_source(name: str) -> None:
    for figure_name, figure in load_profile(name).figures:
        assert figure.label in ("measured", "published", "scaled", "assumed"), figure_name
        assert len(figure.source) > 5, figure_name


def test_the_labels_cover_the_profile_the_framework_and_the_driver() -> None:
    names = [name for name, _ in MODEL.labels()]
    assert len(names) == len(set(names))
    assert {"gemm.efficiency", "host.launch_us", "host.driver.cuda_malloc_us", "overlap.slowdown"} <= set(names)


def test_a_gpu_gets_its_own_profile() -> None:
    assert MODEL.profile.name == "h100-sxm"
    assert CostModel.for_gpu(A100).profile.name == "a100-sxm-80"


def test_a_power_limited_card_keeps_the_h100s_figures_but_the_rate_and_calls_them_scaled() -> None:
    own, parent = load_profile("h100-96gb-hbm2e").figures, load_profile("h100-sxm").figures
    power_sampled = load_profile("h200-sxm").figures.single_source()["gemm.efficiency"]
    assert own["gemm.efficiency"] == pytest.approx(power_sampled * 500 / 691, abs=5e-4)
    assert own["gemm.efficiency"] == load_profile("h100-sxm-500w").figures["gemm.efficiency"]
    assert own["gemm.k_overhead"] == parent["gemm.k_overhead"]
    assert own.by_name["gemm.k_overhead"].label == "scaled"
    assert own.by_name["gemm.k_overhead"].source.startswith("as h100-sxm: ")
    assert own.by_name["gemm.k_overhead"].error == ""


def test_a_profile_of_another_gpu_may_be_named_and_is_called_scaled() -> None:
    profile = profile_for(A100, "h100-sxm")
    assert profile.figures["gemm.efficiency"] == load_profile("h100-sxm").figures["gemm.efficiency"]
    assert {figure.label for _, figure in profile.figures} == {"scaled", "assumed"}


def test_a_gpu_without_a_profile_is_assumed_from_its_datasheet() -> None:
    unknown = FakeGpu(
        "next-gpu", 160, {"bf16": 2000e12}, 8000e9, gpu_link_bytes_per_s=900e9, host_link_bytes_per_s=126e9
    )
    model, h100 = CostModel.for_gpu(unknown), load_profile("h100-sxm").figures
    figures = model.profile.figures
    assert model.profile.name == "assumed:next-gpu"
    assert figures["gemm.efficiency"] == h100["gemm.efficiency"]
    assert (
        figures["collective.all_gather.n8.bandwidth_gb_per_s"]
        == 2 * h100["collective.all_gather.n8.bandwidth_gb_per_s"]
    )
    assert figures["copy.host_to_device_gb_per_s"] == 2 * h100["copy.host_to_device_gb_per_s"]
    assert not {"measured", "published"} & {f.label for n, f in figures if not n.startswith("link.")}
    assert CostModel.for_gpu(unknown, "assumed:next-gpu").profile == model.profile


def test_a_smaller_gpu_is_assumed_like_the_a100_and_without_nvlink_talks_over_pcie() -> None:
    card = FakeGpu("card", 128, {"fp16": 165e12}, 1008e9, "nvlink bridge", 300e9, 31.5e9)
    figures = CostModel.for_gpu(card).profile.figures
    a100 = load_profile("a100-sxm-80").figures
    assert figures["gemm.k_overhead"] == a100["gemm.k_overhead"]
    name = "collective.all_gather.n8.bandwidth_gb_per_s"
    assert figures[name] == pytest.approx(a100[name] * 31.5 / 300)


def test_every_gpu_of_the_catalogue_has_a_profile_of_its_own() -> None:
    for name in gpu_names():
        profile = CostModel.for_gpu(find_gpu(name)).profile
        assert name in profile.gpus
        assert not profile.name.startswith("assumed:")


def test_a_profile_scales_its_links_as_its_header_says() -> None:
    card, base = load_profile("a100-pcie").figures, load_profile("a100-sxm-80").figures
    name = "collective.reduce_scatter.n8.bandwidth_gb_per_s"
    assert card[name] == pytest.approx(base[name] * 31.5 / 300, rel=1e-12)
    assert card["copy.host_to_device_gb_per_s"] == base["copy.host_to_device_gb_per_s"]


def test_a_rate_of_ones_own_replaces_the_profiles() -> None:
    large = kernel(Gemm(16_384, 16_384, 16_384))
    own = CostModel.for_gpu(H100, gemm_efficiency=0.405)
    assert own.profile.figures.by_name["gemm.efficiency"].label == "measured"
    assert own.kernel_ns(large) == pytest.approx(2 * MODEL.kernel_ns(large), rel=0.01)
    assert own.uncertainty(large.work) < MODEL.uncertainty(large.work)
    with pytest.raises(CostError, match="a fraction of the dense peak is expected"):
        CostModel.for_gpu(H100, gemm_efficiency=700)


def test_the_attention_kernel_of_ones_software_replaces_flash2() -> None:
    flash = Attention(1, 32, 8, 8192, 8192, 128, True, False)
    triton = CostModel.for_gpu(H100, attention_kernel="triton")
    assert triton.kernel_ns(kernel(flash)) > 1.5 * MODEL.kernel_ns(kernel(flash))
    assert triton.kernel_ns(kernel(flash)) == MODEL.kernel_ns(kernel(replace(flash, generation="triton")))
    math = replace(flash, generation="math")
    assert triton.kernel_ns(kernel(math)) == MODEL.kernel_ns(kernel(math))
    with pytest.raises(CostError, match="tritan"):
        CostModel.for_gpu(H100, attention_kernel="tritan")


def test_the_single_source_is_kept_beside_what_ships() -> None:
    figures = load_profile("h100-sxm").figures
    alone = figures.single_source()
    assert alone["gemm.efficiency"] != figures["gemm.efficiency"]
    assert alone["gemm.k_overhead"] == figures["gemm.k_overhead"]
    assert not [name for name, _ in load_profile("h100-sxm-500w").figures if name.startswith("single_source.")]


def test_an_unknown_profile_lists_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"one of a100-pcie, .*h100-sxm.* \(did you mean h100-sxm\?\)"):
        CostModel.for_gpu(H100, "h100-smx")


def test_an_unknown_framework_lists_those_that_exist() -> None:
    with pytest.raises(
        ValueError, match=r"one of eager, megatron-deepspeed, none, transformers \(did you mean eager\?\)"
    ):
        CostModel.for_gpu(H100, framework="eagr")


@pytest.mark.parametrize(
    "group",
    [
        {"efficiency": {"value": 0.5, "label": "assumed"}},
        {"efficiency": {"value": 0.5, "label": "guessed", "source": "nobody"}},
        {"efficiency": {"value": "half", "label": "assumed", "source": "nobody"}},
        {"efficiency": {"value": 0.5, "label": "assumed", "source": "nobody", "remark": "?"}},
        {"efficiency": {"value": 0.5, "label": "assumed", "source": "nobody", "sigma": "large"}},
        {"efficiency": 0.5},
    ],
)
def test_a_figure_without_evidence_is_refused(group: dict[str, object]) -> None:
    with pytest.raises(CostError, match=r"mine: gemm\.efficiency"):
        list(flatten("mine", {"gemm": group}))


def test_a_group_says_its_evidence_once() -> None:
    group = {
        "label": "published",
        "source": "them",
        "error": "5 %",
        "sigma": 0.1,
        "a": 1,
        "b": {"value": 2, "label": "assumed", "source": "me"},
    }
    assert dict(flatten("mine", {"g": group})) == {
        "g.a": Figure(1.0, "published", "them", "5 %", 0.1),
        "g.b": Figure(2.0, "assumed", "me"),
    }


def test_host_times_come_from_the_framework() -> None:
    assert framework_names() == ["eager", "megatron-deepspeed", "none", "transformers"]
    launches = [CostModel.for_gpu(H100, framework=name).launch_host_ns(KERNELS[0]) for name in framework_names()]
    assert launches == [5_000, 48_000, 0, 10_000]
    slow = CostModel.for_gpu(H100, framework="megatron-deepspeed")
    reduce = Collective("all_reduce", 1 << 20, "tp", 8)
    assert (slow.collective_host_ns(reduce), MODEL.collective_host_ns(reduce)) == (200_000, 20_000)
    assert (
        slow.host_work_ns(HostWork("selective_policy", 3))
        == MODEL.host_work_ns(HostWork("selective_policy", 3))
        == 33_000
    )


def test_driver_calls_cost_host_time_under_every_framework() -> None:
    assert MODEL.driver_call_ns("cuda_host_alloc") == 3_000_000
    assert MODEL.driver_call_ns("cuda_malloc") == CostModel.for_gpu(H100, framework="transformers").driver_call_ns(
        "cuda_malloc"
    )


def test_unknown_host_work_and_driver_calls_list_those_known() -> None:
    with pytest.raises(CostError, match="did you mean checkpoint_region"):
        MODEL.host_work_ns(HostWork("checkpoint_regions"))
    with pytest.raises(CostError, match="did you mean cuda_malloc"):
        MODEL.driver_call_ns("cudaMalloc")


def test_collectives_sends_and_copies_are_priced_through_the_model() -> None:
    gather = Collective("all_gather", 1 << 30, "fsdp", 8)
    assert (
        MODEL.collective(gather, Group(8)).cap_bytes_per_s
        == MODEL.profile.figures["collective.all_gather.n8.bandwidth_gb_per_s"] * 1e9
    )
    assert MODEL.send(1 << 20, same_node=True).bytes == 1 << 20
    assert MODEL.copy(1 << 20, "device_to_host").latency_ns == 10_000
