"""A profile that the user measured: read from a file, exact for measured shapes, refused with lines where it is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.cost.figures import CostError
from sim.cost.measured import WorkError, work_from_dict, work_to_dict
from sim.cost.model import CostModel
from sim.cost.own import ProfileError, load_own_profile
from sim.cost.profile import load_profile
from sim.hardware.catalogue import find_gpu
from sim.hardware.mesh import Mesh
from sim.program.kernels import Attention, Collective, Gemm, HostCopy, Kernel, Memory
from sim.report.evidence import evidence
from sim.report.runner import check_setup
from sim.scenario import load_scenario
from sim.scenario.problems import ScenarioError
from tests.unit.scenarios import sim

H100, A100 = find_gpu("h100"), find_gpu("a100")
OWN = """\
description: my card
device: {gpu: h100-sxm-80gb}
gemm: {label: measured, source: here, efficiency: 0.7}
host: {label: measured, source: here, launch_us: 7, driver: {cuda_malloc_us: 300}}
measured:
  - {kernel: "aten::mm", gemm: {m: 512, n: 512, k: 512}, ns: 12345, spread: 0.02}
  - {kernel: "aten::gelu", memory: {family: elementwise, bytes: 4096}, ns: 777}
  - {kernel: "c10d::all_gather", collective: {kind: all_gather, bytes: 67108864, group: "", size: 8}, ns: 250000}
  - {kernel: "c10d::all_gather", collective: {kind: all_gather, bytes: 4096, group: "", size: 8}, ns: 3000}
"""
SCENARIO = """\
model: {preset: gpt2-small, implementation: nanogpt}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 512}
profile: %s
"""


def write(folder: Path, text: str = OWN, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_what_was_measured_is_looked_up_and_the_rest_is_the_fit(tmp_path: Path) -> None:
    model = CostModel.for_gpu(H100, write(tmp_path))
    shipped = CostModel.for_gpu(H100)
    assert model.kernel_ns(Kernel("aten::mm", Gemm(512, 512, 512))) == 12345
    assert model.kernel_ns(Kernel("aten::addmm", Gemm(512, 512, 512))) == 12345
    assert model.kernel_ns(Kernel("aten::gelu", Memory("elementwise", 4096, flops=9))) == 777
    add = Kernel("aten::add", Memory("elementwise", 4096))
    assert model.kernel_ns(add) == shipped.kernel_ns(add)
    assert model.profile.figures["gemm.efficiency"] == 0.7
    assert model.uncertainty(Gemm(512, 512, 512), "aten::mm") == 0.02
    large = Kernel("aten::mm", Gemm(8192, 8192, 8192))
    assert model.kernel_ns(large) > shipped.kernel_ns(large)


def test_an_explanation_says_that_it_was_measured_here(tmp_path: Path) -> None:
    explanation = CostModel.for_gpu(H100, write(tmp_path)).explain(Kernel("aten::mm", Gemm(512, 512, 512)))
    assert (explanation.form, explanation.bound, explanation.level_ns[0]) == ("measured", "measured here", 12345)


@pytest.mark.parametrize(("size", "ns"), [(64 << 20, 250_000), (4096, 3000)])
def test_a_measured_collective_takes_its_time_on_a_link_of_its_own(tmp_path: Path, size: int, ns: int) -> None:
    """Also where it is shorter than the form's latency; between nodes the form is asked."""
    model = CostModel.for_gpu(H100, write(tmp_path))
    work = Collective("all_gather", size, "fsdp", 8)
    cost = model.collective(work, Mesh((("fsdp", 8),), 8, 8).span("fsdp"))
    assert cost.alone_ns == pytest.approx(ns)
    assert cost.cap_bytes_per_s <= H100.gpu_link_bytes_per_s
    apart = Mesh((("fsdp", 8),), 1, 8).span("fsdp")
    assert model.collective(work, apart) == CostModel.for_gpu(H100).collective(work, apart)


def test_launches_are_those_of_eager_mode_and_the_driver_is_everybodys(tmp_path: Path) -> None:
    path = write(tmp_path)
    eager, transformers = (CostModel.for_gpu(H100, path, framework=name) for name in ("eager", "transformers"))
    assert eager.host.launch_ns == 7000
    assert transformers.host.launch_ns == CostModel.for_gpu(H100, framework="transformers").host.launch_ns
    assert eager.driver_call_ns("cuda_malloc") == transformers.driver_call_ns("cuda_malloc") == 300_000


def test_on_another_gpu_it_is_scaled_and_its_shapes_are_not_used(tmp_path: Path) -> None:
    model = CostModel.for_gpu(A100, write(tmp_path))
    assert model.gpu == A100
    assert model.profile.figures.by_name["gemm.efficiency"].label == "scaled"
    assert model.kernel_ns(Kernel("aten::mm", Gemm(512, 512, 512))) != 12345


def test_a_device_of_no_catalogue_brings_its_own_facts(tmp_path: Path) -> None:
    text = OWN.replace(
        "{gpu: h100-sxm-80gb}",
        "{name: my CPU, kind: cpu, sms: 2, peaks: {fp32: 1.0e+11}, memory_bandwidth_bytes_per_s: 2.0e+10}",
    )
    model = CostModel.for_gpu(H100, write(tmp_path, text))
    assert (model.gpu.name, model.gpu.sms, model.gpu.peak_flops_per_s("bf16")) == ("my CPU", 2, 1e11)
    assert model.kernel_ns(Kernel("aten::mm", Gemm(512, 512, 512))) == 12345
    labels = {figure.label for name, figure in model.profile.figures if name.startswith("collective.")}
    assert labels == {"assumed"}


def test_a_processor_is_not_said_to_have_tensor_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text(
        "device: {name: my CPU, kind: cpu, sms: 2, peaks: {fp32: 1.0e+11}, memory_bandwidth_bytes_per_s: 1.0e+10}\n"
    )
    result = sim("cost", "gemm", 4096, 4096, 4096, "--profile", tmp_path / "cpu.yaml")
    assert result.exit_code == 0, result.stderr
    told = " ".join(result.stdout.split())
    assert "bound by arithmetic" in told and "of the fastest product measured" in told
    assert "tensor cores" not in told and "16-bit peak" not in told


def test_all_mistakes_of_a_file_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
device: {gpu: h100-smx-80gb}
gem: {efficiency: 0.7}
gemm: {label: measured, source: here, eficiency: 0.7, k_overhead: many, fixed_us: -1}
memory: {elementwise: {bandwidth_efficiency: 0.9}}
measured:
  - {kernel: "aten::mm", gemm: {m: 512, q: 1}, ns: 5}
  - {kernel: "aten::mm", gem: {m: 512}, ns: 5}
  - {kernel: "aten::mm", gemm: {m: 512, n: 512, k: 512}, ns: 0}
"""
    with pytest.raises(ProfileError) as error:
        load_own_profile(Path(write(tmp_path, text)))
    told = str(error.value)
    for line in (
        "line 1  device.gpu",
        "line 2  gem ",
        "line 3  gemm.eficiency",
        "line 3  gemm.k_overhead",
        "line 3  gemm.fixed_us",
        "line 4  memory.elementwise.bandwidth_efficiency",
        "line 6  measured[0]",
        "line 7  measured[1]",
        "line 8  measured[2]",
    ):
        assert line in told
    assert "(did you mean h100-sxm-80gb?)" in told
    assert told.endswith("9 problems. The profile is not used.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("gemm: [", "not YAML"),
        ("gemm: {efficiency: {value: 0.7, label: measured, source: x}}", "device"),
        ("device: {name: x}\n", "device.peaks"),
        ("device: {gpu: h100-sxm-80gb}\nbase: h100\n", "base"),
        ("device: {gpu: h100-sxm-80gb}\nmeasured: 3\n", "measured"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_own_profile(Path(write(tmp_path, text)))


def test_a_missing_file_is_an_error_of_the_costs() -> None:
    with pytest.raises(CostError, match="no such file"):
        CostModel.for_gpu(H100, "nowhere.yaml")


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    assert load_own_profile(path).figures["gemm.efficiency"] == 0.7
    path.write_text(OWN.replace("0.7", "0.6"))
    os.utime(path, ns=(1, 1))
    assert load_own_profile(path).figures["gemm.efficiency"] == 0.6


@pytest.mark.parametrize(
    "work",
    [
        Gemm(8, 16, 32, "fp16", batch=3),
        Attention(1, 8, 2, 128, 256, 64, True, True, "efficient", "fp32"),
        Memory("norm_forward", 4096),
        Collective("all_gather", 1 << 20, "", 8),
        HostCopy("device_to_host", 4096, pinned=False),
    ],
)
def test_work_survives_being_written(work: Gemm) -> None:
    assert work_from_dict(work_to_dict(work)) == work


@pytest.mark.parametrize(
    "entry", [None, {}, {"gemm": {"m": 1}}, {"gemm": 3}, {"gemm": {}, "memory": {}}, {"copy": {"x": 1}}]
)
def test_what_describes_no_work_is_refused(entry: object) -> None:
    with pytest.raises(WorkError):
        work_from_dict(entry)


def test_a_scenario_names_a_profile_beside_it(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "scenario.yaml").write_text(SCENARIO % "mine.yaml")
    scenario = load_scenario(tmp_path / "scenario.yaml")
    (setup,) = scenario.strategies
    assert setup.profile == str(tmp_path / "mine.yaml")
    check_setup(setup)
    assert str(tmp_path / "mine.yaml") in scenario.text
    again = tmp_path / "elsewhere"
    again.mkdir()
    (again / "dumped.yaml").write_text(scenario.text)
    assert load_scenario(again / "dumped.yaml").strategies[0].profile == setup.profile


def test_a_scenario_that_names_no_file_is_told_where_it_looked(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(SCENARIO % "missing.yaml")
    with pytest.raises(ScenarioError) as error:
        load_scenario(tmp_path / "scenario.yaml")
    (problem,) = error.value.problems
    assert (problem.line, problem.path, problem.value) == (4, "profile", "missing.yaml")
    assert str(tmp_path / "missing.yaml") in problem.message
    assert "sim calibrate" in problem.message


def test_times_of_a_profile_of_ones_own_are_called_calibrated(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "scenario.yaml").write_text(SCENARIO % "mine.yaml")
    (setup,) = load_scenario(tmp_path / "scenario.yaml").strategies
    time = evidence(setup)["time"]
    assert time.label == "calibrated"
    assert "mine.yaml, measured on h100-sxm-80gb" in time.source
    assert "not measured: attention, collective, copy, memory" in time.source


def test_shipped_profiles_measure_no_shapes() -> None:
    assert len(load_profile("h100-sxm").measured) == 0


def test_a_profile_of_a_processor_is_doubted_where_a_gpu_is_to_run(tmp_path: Path) -> None:
    device = "{kind: cpu, name: a processor, sms: 2, peaks: {fp32: 1.0e+11}, memory_bandwidth_bytes_per_s: 2.0e+10}"
    files = {"cpu.yaml": OWN.replace("{gpu: h100-sxm-80gb}", device), "gpu.yaml": OWN, "torn.yaml": "device: ["}
    said = {}
    for name, text in files.items():
        scenario = tmp_path / f"of_{name}"
        scenario.write_text(SCENARIO % write(tmp_path, text, name))
        said[name] = load_scenario(scenario).warnings
    (warning,) = said.pop("cpu.yaml")
    assert "was measured on a CPU" in warning and "profile" in warning
    assert set(said.values()) == {()}
