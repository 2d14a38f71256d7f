"""`sim diff`: a run against itself, against itself made slower, and against a trace of real PyTorch on this CPU."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sim.checks.kineto import family_of, read_trace, read_traces
from sim.checks.trace_diff import trace_diff
from tests.unit.scenarios import PIPELINE, TINY, sim, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    text = TINY.replace("llama-tiny", "llama-3.2-1b").replace("seq_len: 512", "seq_len: 2048")
    assert sim("run", write(folder, text, "mine.yaml"), "--out", folder).exit_code == 0
    return folder / "mine"


def changed(trace: Path, folder: Path, change: dict[str, float]) -> Path:
    """The trace with kernels of some names taking so many times as long, everything later moved."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    for event in document["traceEvents"]:
        for name, factor in change.items():
            if event.get("cat") == "kernel" and re.search(name, event["name"]):
                event["dur"] *= factor
    path = folder / "changed.json"
    path.write_text(json.dumps(document))
    return path


def test_a_run_differs_from_itself_in_nothing(run: Path) -> None:
    traces = read_traces(run / "full" / "trace.json.gz")
    diff = trace_diff(traces, traces)
    assert {line.difference for line in (*diff.parts, *diff.families)} <= {0.0, None}
    step, compute, exposed, copies, idle = (line.other_us for line in diff.parts)
    assert step == pytest.approx(compute + exposed + copies + idle, rel=0.02)
    assert not [name for name, _ in diff.unnamed if name.startswith("aten::mm")]


def test_kernels_and_times_of_families_are_those_of_the_tables(run: Path) -> None:
    import pyarrow.parquet as parquet

    table = parquet.read_table(run / "full" / "kernels.parquet").to_pydict()
    gemm_ns = sum(d for name, d in zip(table["name"], table["duration_ns"]) if name == "aten::mm")
    (trace,) = read_traces(run / "full" / "trace.json.gz")
    assert sum(step.families["gemm"][1] for step in trace.steps) == pytest.approx(gemm_ns / 1e3, rel=1e-6)


def test_slower_products_are_found(run: Path, tmp_path: Path) -> None:
    slow = changed(run / "full" / "trace.json.gz", tmp_path, {"aten::mm": 1.25})
    diff = trace_diff(read_traces(run / "full" / "trace.json.gz"), read_traces(slow))
    differences = {line.name: line.difference for line in diff.families}
    assert differences["gemm"] == pytest.approx(1 / 1.25 - 1)
    assert differences["attention"] == 0.0


def test_the_kernels_names_of_a_gpu_have_families() -> None:
    names = {
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn": "gemm",
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "gemm",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>": "attention",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all-gather",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "reduce-scatter",
        "Memcpy DtoH (Device -> Pinned)": "copy",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
        "void (anonymous namespace)::softmax_warp_forward<float>": "loss",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>": "norm",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "triton_poi_fused_add_mul_silu_0": "activation",
        "something_else": "other",
    }
    assert {name: family_of(("", name)) for name in names} == names
    assert family_of(("aten::mm", "something_else")) == "gemm"


# -- the verb --------------------------------------------------------------------------------------------------------
def test_the_tables_and_the_json_say_the_same(run: Path) -> None:
    shown = sim("diff", run / "full", run / "none" / "trace.json.gz")
    assert shown.exit_code == 0 and "exposed communication" in shown.stdout
    assert "real" not in shown.stdout and "Both traces were simulated" in shown.stdout
    data = json.loads(sim("diff", run / "full", run / "none" / "trace.json.gz", "--json").stdout)
    assert data["other"] == "simulated"
    families = {row["name"]: row for row in data["families"]}
    assert families["gemm"]["simulated_count"] > families["gemm"]["other_count"]  # recomputed


def test_folders_of_ranks_are_compared_by_their_slowest(tmp_path: Path) -> None:
    scenario = write(tmp_path, PIPELINE, "pipe.yaml")
    assert sim("run", scenario, "--only", "1f1b", "--every-rank", "--out", tmp_path).exit_code == 0
    folder = tmp_path / "pipe" / "1f1b"
    result = sim("diff", folder, folder / "ranks")
    assert result.exit_code == 0 and "Of 2 second ranks the slowest is shown" in result.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not json", "not a trace"),
        (b"\x1f\x8bbroken", "not a trace"),
        (b"3", "an object is expected"),
        (b"{}", "no traceEvents"),
        (b'{"traceEvents": []}', "neither kernels nor operators"),
        (
            b'{"traceEvents": [3, {"ph": "X", "ts": "x"}, {"ph": "X", "cat": "kernel"}]}',
            "neither kernels nor operators",
        ),
    ],
)
def test_wrong_traces_are_answered(run: Path, tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    result = sim("diff", run / "full", file)
    assert result.exit_code == 2 and says in result.stderr


def test_wrong_folders_are_answered(run: Path, tmp_path: Path) -> None:
    assert "the folder of one strategy is expected" in sim("diff", run, run).stderr
    assert "no trace" in sim("diff", run / "full", tmp_path).stderr
    assert "no such file" in sim("diff", run / "full", tmp_path / "nowhere.json").stderr


# -- real PyTorch ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three profiled training steps of two linear layers with a norm between, on this CPU."""
    torch = pytest.importorskip("torch", reason="profiles PyTorch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    path = tmp_path_factory.mktemp("cpu") / "cpu.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_real_cpu_trace_is_read(cpu_trace: Path) -> None:
    """Per step: 2 forward products and 3 for gradients (the first input needs none), a norm each way, an optimizer."""
    trace = read_trace(cpu_trace)
    assert trace.device == "cpu" and len(trace.steps) == 3
    for step in trace.steps:
        assert step.families["norm"][0] >= 2 and step.families["gemm"][0] >= 5
        times: list[Any] = [time for _, time in step.families.values()]
        assert sum(times) <= step.length * 1.001
        assert step.compute + step.idle == pytest.approx(step.length, rel=1e-6)


def test_a_cpu_trace_beside_a_simulated_gpu_run_says_what_can_be_compared(cpu_trace: Path, run: Path) -> None:
    result = sim("diff", run / "full", cpu_trace)
    assert result.exit_code == 0
    assert "operators of a CPU" in result.stdout and "2 real steps" in result.stdout
