"""A profile from a trace: one that this CPU records, one of a GPU's shape, and one that sim wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from calibration.measure.points import TimedPoint
from calibration.measure.words import CalibrationError
from calibration.own.calibrate import calibrate_from_trace
from calibration.own.operators import work_of
from calibration.own.trace import read_trace_points
from sim.cost.model import CostModel
from sim.cost.own import load_own_profile
from sim.hardware.catalogue import find_gpu
from sim.program.kernels import Attention, Gemm, HostCopy, Kernel, Memory, Work
from tests.unit.scenarios import sim, write

H100 = find_gpu("h100")
ONE_GPU = """\
model: {preset: llama-3.2-1b, implementation: torchtitan}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 512}
"""
T, H, F = 96, 64, 256
"""Tokens, hidden, feed-forward."""


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training steps of two linear layers with a norm and attention between, with shapes."""
    torch = pytest.importorskip("torch", reason="profiles PyTorch")
    up, norm, down = torch.nn.Linear(H, F), torch.nn.LayerNorm(F), torch.nn.Linear(F, H)
    x = torch.randn(T, H)

    def step() -> None:
        h = torch.nn.functional.gelu(norm(up(x)))
        q = h.view(1, T, 4, F // 4).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        down(y.transpose(1, 2).reshape(T, F)).square().mean().backward()

    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        step()
    path = tmp_path_factory.mktemp("trace") / "cpu.json.gz"
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def works(path: Path) -> dict[tuple[str, Any], TimedPoint]:
    _, points, _ = read_trace_points(path)
    return {(point.name, point.work): point for point in points if isinstance(point, TimedPoint)}


def test_a_cpu_trace_says_every_product_each_way(cpu_trace: Path) -> None:
    """Forward with a bias; gradients of the second layer's input and weight, and of the first one's weight."""
    found = works(cpu_trace)
    products = {(name, work): p for (name, work), p in found.items() if isinstance(work, Gemm)}
    assert {name: work for name, work in products if name == "aten::addmm" and work.n == F} == {
        "aten::addmm": Gemm(T, F, H, "fp32")
    }
    assert set(products) == {
        ("aten::addmm", Gemm(T, F, H, "fp32")),
        ("aten::addmm", Gemm(T, H, F, "fp32")),
        ("aten::mm", Gemm(T, F, H, "fp32")),
        ("aten::mm", Gemm(H, F, T, "fp32")),
        ("aten::mm", Gemm(F, H, T, "fp32")),
    }
    assert all(point.measured.rounds == 2 for point in products.values())


def test_a_cpu_trace_says_attention_and_passes(cpu_trace: Path) -> None:
    found = works(cpu_trace)
    forward = Attention(1, 4, 4, T, T, F // 4, True, False, dtype="fp32")
    assert ("aten::_flash_attention_forward", forward) in found
    backward = Attention(1, 4, 4, T, T, F // 4, True, True, dtype="fp32")
    assert ("aten::_flash_attention_backward", backward) in found
    assert ("aten::native_layer_norm", Memory("norm_forward", 2 * 4 * T * F)) in found
    assert ("aten::gelu", Memory("elementwise", 2 * 4 * T * F)) in found
    assert ("aten::gelu_backward", Memory("elementwise", 3 * 4 * T * F)) in found


def test_a_profile_of_a_cpu_trace_prices_its_kernels_as_they_were(cpu_trace: Path, tmp_path: Path) -> None:
    told = calibrate_from_trace(cpu_trace, tmp_path / "cpu.yaml")
    assert "measuring is more exact" in told and "cpu.yaml" in told
    model = CostModel.for_gpu(H100, str(tmp_path / "cpu.yaml"))
    for (name, work), point in works(cpu_trace).items():
        if isinstance(work, Gemm | Attention | Memory):
            assert model.kernel_ns(Kernel(name, work)) == round(point.measured.median_ns)


def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 1, "ts": ts, "dur": dur, "args": args}


def gpu_trace() -> dict[str, Any]:
    """What Kineto writes of one linear layer in bf16: the operator inside aten::linear, split into two kernels; a copy."""
    bf16 = "c10::BFloat16"
    shapes = {"Input Dims": [[512, 1024], [1024, 256]], "Input type": [bf16, bf16]}
    return {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
        "traceEvents": [
            event("cpu_op", "aten::linear", 0, 50, **{"External id": 1}),
            event("cpu_op", "aten::mm", 10, 30, **{"External id": 2}, **shapes),
            event("cuda_runtime", "cudaLaunchKernel", 15, 3, correlation=7, **{"External id": 2}),
            event("cuda_runtime", "cudaLaunchKernel", 20, 3, correlation=8, **{"External id": 2}),
            event("kernel", "nvjet_tst_128x256", 100, 20, correlation=7),
            event("kernel", "splitKreduce", 120, 5, correlation=8),
            event("cpu_op", "aten::fancy", 60, 9, **{"External id": 3}),
            event("cuda_runtime", "cudaLaunchKernel", 61, 3, correlation=9, **{"External id": 3}),
            event("kernel", "fancy_kernel", 130, 4, correlation=9),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200, 10, correlation=10, bytes=1 << 20),
        ],
    }


def test_kernels_of_a_gpu_are_joined_to_the_shapes_of_their_operator(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(gpu_trace()))
    info, points, remarks = read_trace_points(path)
    assert {point.work: point.measured.median_ns for point in points if isinstance(point, TimedPoint)} == {
        Gemm(512, 256, 1024): 25_000.0,
        HostCopy("host_to_device", 1 << 20): 10_000.0,
    }
    assert (info["kind"], info["title"], info["sms"]) == ("cuda", "NVIDIA H100 80GB HBM3", 132)
    assert remarks == ["No shapes are read for aten::fancy (1 kernels)"]
    calibrate_from_trace(path, tmp_path / "gpu.yaml")
    profile = load_own_profile(tmp_path / "gpu.yaml")
    assert profile.gpus == ("h100-sxm-80gb",)
    model = CostModel.for_gpu(H100, str(tmp_path / "gpu.yaml"))
    assert model.kernel_ns(Kernel("aten::mm", Gemm(512, 256, 1024))) == 25_000
    fitted = CostModel(H100, profile, model.host, model.collectives, model.overlap)._time(Gemm(512, 256, 1024))
    assert fitted.total_ns == pytest.approx(25_000, rel=1e-3)
    assert model.profile.figures["copy.host_to_device_gb_per_s"] > 0


def test_a_trace_that_sim_wrote_gives_back_its_own_times(tmp_path: Path) -> None:
    """Simulate, take a profile from the trace, simulate with it: every kernel of the step as before, exactly."""
    assert sim("run", write(tmp_path, ONE_GPU, "mine.yaml"), "--out", tmp_path).exit_code == 0
    trace = tmp_path / "mine" / "default" / "trace.json.gz"
    result = sim("calibrate", "--from-trace", trace, "--out", tmp_path / "of-trace.yaml")
    assert result.exit_code == 0, result.stderr
    before, after = CostModel.for_gpu(H100), CostModel.for_gpu(H100, str(tmp_path / "of-trace.yaml"))
    kernels = {Kernel(p.name, p.work) for p in works(trace).values() if isinstance(p.work, Work)}
    assert len(kernels) > 20
    assert {k: after.kernel_ns(k) for k in kernels} == {k: before.kernel_ns(k) for k in kernels}
    assert after.profile.device == H100


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten::mm", {}),
        ("aten::mm", {"Input Dims": [[4, 8], [9, 2]], "Input type": ["float", "float"]}),
        ("aten::mm", {"Input Dims": [[4, 8], [8, 2]], "Input type": ["", ""]}),
        ("aten::gelu", {"Input Dims": [[]], "Input type": ["float"]}),
        ("aten::_flash_attention_forward", {"Input Dims": [[1, 2, 3, 4]] * 3, "Input type": ["float"] * 3}),
    ],
)
def test_calls_without_usable_shapes_are_left_out(name: str, arguments: dict[str, Any]) -> None:
    assert work_of(name, arguments) is None


def test_lists_of_tensors_count_all_their_elements() -> None:
    arguments = {"Input Dims": [[[8, 8], [16]], [[8, 8], [16]]], "Input type": ["TensorList", "TensorList"]}
    assert work_of("aten::_fused_adamw_", arguments) == ("aten::_fused_adamw_", Memory("optimizer", 28 * 80))


def test_casts_count_both_dtypes() -> None:
    arguments = {"Input Dims": [[64], [64], []], "Input type": ["c10::BFloat16", "float", "Scalar"]}
    assert work_of("aten::copy_", arguments) == ("aten::copy_", Memory("elementwise", 64 * 6))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{}", "no traceEvents"),
        (b"nothing", "not a trace"),
        (json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0, 1)]}).encode(), "record_shapes=True"),
    ],
)
def test_traces_without_shapes_are_answered(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=says):
        read_trace_points(path)
    result = sim("calibrate", "--from-trace", path)
    assert result.exit_code == 2 and says in result.stderr and str(path) in result.stderr


def test_a_missing_trace_is_answered() -> None:
    result = sim("calibrate", "--from-trace", "nowhere.json")
    assert result.exit_code == 2 and "nowhere.json: no such file" in result.stderr
