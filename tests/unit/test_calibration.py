"""Measuring: cases of every script, budget, resume, Ctrl-C, a short calibration of this CPU, wrong arguments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calibration.measure import gemm, norms, optimizers
from calibration.measure.campaign import Plan, plan, run
from calibration.measure.case import Case, Reading, Value
from calibration.measure.device import CpuDevice
from calibration.measure.families import FAMILIES, cases_of, readings_of, recipes
from calibration.measure.passes import PASSES
from calibration.measure.points import PointFile, TimedPoint, read_points
from calibration.measure.scenario import work_of
from calibration.measure.timing import Measured, Policy, measure
from calibration.measure.words import CalibrationError
from calibration.own.facts import LARGE_FLOPS
from sim.cost.model import CostModel
from sim.hardware.catalogue import find_gpu
from sim.program.kernels import Attention, Gemm, Kernel, Memory
from tests.unit.calibration_fixtures import FakeDevice, Given, given
from tests.unit.scenarios import sim

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = """\
model: {preset: gpt2-small, implementation: nanogpt, layers: 1, hidden: 64, heads: 2, vocab: 512}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 96}
precision: {parameters: fp32, compute: fp32}
"""
SECOND_NS = 1e9


def products(count: int) -> list[Case]:
    return [gemm.case(Gemm(64 * (n + 1), 64, 64, "bf16")) for n in range(count)]


# -- a case ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_script_builds_and_runs_its_smallest_cases(family: str) -> None:
    """One case of each kernel on this CPU; what needs a GPU or several ranks has none here."""
    device, seen = CpuDevice(threads=1, cold=False), set()
    for case in cases_of(family, device):
        if case.name in seen or case.work.bytes > 16 << 20:
            continue
        seen.add(case.name)
        call = case.build(device)
        call()
        call()
    assert seen or family in ("collectives", "host", "contention", "memory_use")
    assert [reading.figure for reading in readings_of(family, device)] == (
        [f"host.work.{name}_us" for name in ("checkpoint_region", "selective_policy", "optimizer_loop")]
        if family == "host"
        else []
    )


def test_every_recipe_is_counted_as_programs_count_it() -> None:
    assert set(recipes()) == set(PASSES)


@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_a_product_has_the_shape_that_its_work_says(layout: str) -> None:
    device = CpuDevice(threads=1, cold=False)
    out = gemm.case(Gemm(24, 40, 56, "fp32"), layout).build(device)()
    assert tuple(out.shape) == (24, 40)  # type: ignore[attr-defined]


def test_cold_operands_rotate_and_hot_ones_do_not() -> None:
    device = CpuDevice(threads=1)
    seen = set()
    case = gemm.case(Gemm(64, 64, 64, "fp32"))
    for cold in (True, False):
        device.cold = cold
        call = case.build(device)
        assert isinstance(call, object)
        ring = call.__closure__  # type: ignore[attr-defined]
        (cycle,) = [cell.cell_contents for cell in ring if type(cell.cell_contents).__name__ == "cycle"]
        seen.add(len({id(next(cycle)[0]) for _ in range(200)}))
    assert seen == {64, 1}


# -- timing ---------------------------------------------------------------------------------------------------------


def test_times_are_summed_up_by_median_and_percentiles() -> None:
    measured = Measured.of([10.0, 20.0, 30.0, 40.0, 50.0])
    assert (measured.median_ns, measured.p10_ns, measured.p90_ns, measured.rounds) == (30.0, 14.0, 46.0, 5)
    assert measured.relative_spread == pytest.approx(16 / 30)


@pytest.mark.parametrize(("ns", "rounds"), [(1e9, 5), (1e7, 40), (1.0, 100)])
def test_rounds_are_as_many_as_the_time_of_a_case_allows(ns: float, rounds: int) -> None:
    assert measure(FakeDevice(), Given(ns), Policy(case_s=0.4)).rounds == rounds


# -- a campaign -----------------------------------------------------------------------------------------------------


def test_the_scenario_comes_first_then_readings_then_families_in_turn() -> None:
    a, b, c, d, e = products(5)
    reading = Reading("host", "host.launch_us", lambda device: Value(1.0))
    entries = plan([c], [[a, c, b], [d, e]], [reading]).entries
    assert [entry.key for entry in entries] == [x.key for x in (c, reading, a, d, e, b)]


def test_points_are_kept_and_not_measured_again(tmp_path: Path) -> None:
    device, path = FakeDevice(), tmp_path / "x.points.jsonl"
    cases = given(products(4), lambda work: 1000.0)
    first = run(device, Plan(cases[:2]), PointFile(path, device.info().as_dict()), 1, clock=device.clock)
    second = run(device, Plan(cases), PointFile(path, device.info().as_dict()), 1, clock=device.clock)
    assert (first.measured, second.measured, second.known) == (2, 2, 2)
    info, points = read_points(path)
    assert [point.key for point in points] == [case.key for case in cases]
    assert info == device.info().as_dict()
    assert {tuple(point.details["kernels"]) for point in points} == {("a_kernel",)}


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    device, path = FakeDevice(interrupt_at=11), tmp_path / "x.points.jsonl"
    cases = given(products(5), lambda work: SECOND_NS / 100)
    report = run(device, Plan(cases), PointFile(path, device.info().as_dict()), 1, clock=device.clock)
    assert report.interrupted and 0 < report.measured < 5
    assert len(read_points(path)[1]) == report.measured
    device.interrupt_at = None
    again = run(device, Plan(cases), PointFile(path, device.info().as_dict()), 1, clock=device.clock)
    assert (again.known, again.known + again.measured, again.interrupted) == (report.measured, 5, False)


def test_a_line_cut_short_is_measured_again(tmp_path: Path) -> None:
    device, path = FakeDevice(), tmp_path / "x.points.jsonl"
    cases = given(products(3), lambda work: 1000.0)
    run(device, Plan(cases), PointFile(path, device.info().as_dict()), 1, clock=device.clock)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_points(path)[1]) == 2
    again = run(device, Plan(cases), PointFile(path, device.info().as_dict()), 1, clock=device.clock)
    assert (again.known, again.measured) == (2, 1)
    assert len(read_points(path)[1]) == 3


def test_the_budget_is_kept(tmp_path: Path) -> None:
    """A hundred cases of a twentieth of a second in three seconds: it ends in time, and says how many are left."""
    device, path = FakeDevice(), tmp_path / "x.points.jsonl"
    cases = given(products(100), lambda work: SECOND_NS / 20)
    report = run(device, Plan(cases), PointFile(path, device.info().as_dict()), 0.05, clock=device.clock)
    assert 3 <= device.seconds < 3 + 7 / 20
    assert report.out_of_time == 100 - report.measured > 0


def test_what_is_too_large_or_too_slow_is_left_out_with_its_reason(tmp_path: Path) -> None:
    device = FakeDevice(free=16 << 30)
    huge, slow = gemm.case(Gemm(1 << 17, 1 << 16, 1 << 10)), gemm.case(Gemm(1 << 12, 1 << 12, 1 << 16))
    device.name = "cpu"
    file = PointFile(tmp_path / "x.points.jsonl", device.info().as_dict())
    report = run(device, Plan(given([huge, slow], lambda work: 1.0)), file, 0.1, clock=device.clock)
    assert report.measured == 0
    assert "needs 16.4 GiB, 16.0 GiB are free" in report.left_out[0]
    assert "of the 6 s given" in report.left_out[1]


def test_small_cases_do_not_make_large_ones_look_slow(tmp_path: Path) -> None:
    """A tiny product that waits 16 ms for its turn is no reason to leave out one that takes as long."""
    device = FakeDevice(name="cpu")
    file = PointFile(tmp_path / "x.points.jsonl", device.info().as_dict())
    both = given([gemm.case(Gemm(112, 64, 32)), gemm.case(Gemm(1712, 256, 48))], lambda work: 16e6)
    report = run(device, Plan(both), file, 0.3, clock=device.clock)
    assert (report.measured, report.left_out) == (2, [])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_designs_begin_with_a_case_that_shows_the_rate(name: str) -> None:
    device = FakeDevice(name=name)
    for module in (norms, optimizers):
        cases = list(module.cases(device))
        assert cases[0].work.bytes > 8 << 20 and min(case.work.bytes for case in cases) < 128 << 10
        assert len({case.key for case in cases}) == len(cases)
    assert next(gemm.cases(device)).work.flops >= LARGE_FLOPS or name == "cuda"


def test_collectives_of_one_process_are_told_and_make_no_profile(tmp_path: Path) -> None:
    result = sim(
        "calibrate", "--device", "cpu", "--only", "collectives", "--minutes", 0.1, "--out", tmp_path / "x.yaml"
    )
    assert result.exit_code == 2
    assert "Not measured: collectives: need several processes: torchrun" in result.stderr
    assert result.stderr.endswith("Nothing was measured: no profile is written\n")
    assert not (tmp_path / "x.yaml").exists()


def test_a_kernel_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    def fail(device: object) -> Given:
        raise RuntimeError("CUDA error: no kernel image\nmore")

    device = FakeDevice()
    first, second = given(products(2), lambda work: 1.0)
    broken = Case(first.family, first.work, fail, first.name, first.variant)
    file = PointFile(tmp_path / "x.points.jsonl", device.info().as_dict())
    report = run(device, Plan([broken, second]), file, 1, clock=device.clock)
    assert report.measured == 1
    assert report.left_out == [f"{broken.title}: CUDA error: no kernel image"]


def test_points_of_another_device_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.points.jsonl"
    PointFile(path, FakeDevice().info().as_dict())
    with pytest.raises(CalibrationError, match=r"another device or software.*title"):
        PointFile(path, FakeDevice(title="other").info().as_dict())
    path.write_text("nothing\n")
    with pytest.raises(CalibrationError, match="line 1"):
        PointFile(path, FakeDevice().info().as_dict())


# -- a scenario -----------------------------------------------------------------------------------------------------


def test_a_scenarios_kernels_become_cases_in_their_layouts(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(SCENARIO)
    work = work_of(tmp_path / "gpt.yaml")
    assert all(case.origin == "scenario" for case in work.cases)
    found = {(case.name, case.variant, case.work) for case in work.cases}
    up = Gemm(96, 3072, 64, "fp32")
    assert ("aten::addmm", "forward", up) in found
    assert ("aten::mm", "dgrad", Gemm(96, 64, 3072, "fp32")) in found
    assert ("aten::mm", "wgrad", Gemm(3072, 64, 96, "fp32", over_rows=True)) in found
    assert any(isinstance(work, Attention) and work.backward for _, _, work in found)
    assert any(name == "aten::_fused_adamw_" for name, _, _ in found)
    assert all(name not in {case.name for case in work.cases} for name in work.left_out)


# -- the whole ------------------------------------------------------------------------------------------------------


def test_a_short_calibration_of_this_cpu_writes_a_profile_that_a_scenario_uses(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(SCENARIO + "profile: cpu.yaml\n")
    (tmp_path / "plain.yaml").write_text(SCENARIO)
    options = ("--device", "cpu", "--threads", 1, "--minutes", 0.1, "--only", "gemm", "--only", "norms")
    result = sim("calibrate", *options, "--scenario", tmp_path / "plain.yaml", "--out", tmp_path / "cpu.yaml")
    assert result.exit_code == 0, result.stderr
    info, points = read_points(tmp_path / "cpu.points.jsonl")
    assert info["kind"] == "cpu" and info["threads"] == 1
    timed = [point for point in points if isinstance(point, TimedPoint)]
    assert {point.family for point in timed} == {"gemm", "norms"}
    assert timed[0].origin == "scenario" and timed[0].hot is not None
    model = CostModel.for_gpu(find_gpu("h100"), str(tmp_path / "cpu.yaml"))
    for point in timed:
        if point.origin == "scenario" and isinstance(point.work, Memory):
            assert model.kernel_ns(Kernel(point.name, point.work)) == round(point.measured.median_ns)
    ran = sim("run", tmp_path / "gpt.yaml", "--no-files", "--json")
    assert ran.exit_code == 0, ran.stderr
    labels = json.loads(ran.stdout)["strategies"][0]["labels"]
    assert labels["time"]["label"] == "calibrated"
    shown = sim("profiles", tmp_path / "cpu.yaml", "--only", "gemm")
    assert shown.exit_code == 0 and "measured" in shown.stdout


def test_ctrl_c_ends_the_verb_with_its_points(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sim", "calibrate", "--device", "cpu", "--threads", "1", "--only", "norms"]
    command += ["--minutes", "5", "--out", str(tmp_path / "cpu.yaml")]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    points = tmp_path / "cpu.points.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and (not points.exists() or points.read_text().count("\n") < 3):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted: what was measured is kept; run again to go on." in out
    assert len(read_points(points)[1]) >= 2
    assert not (tmp_path / "cpu.yaml").exists()


def test_all_wrong_arguments_are_told_at_once(tmp_path: Path) -> None:
    result = sim("calibrate", "--device", "gpu", "--minutes", -1, "--out", tmp_path / "no" / "x.json", "--only", "gem")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "--device gpu: one of cuda, cpu",
        "--minutes -1: a number above 0 is expected, e.g. 5",
        f"--out {tmp_path / 'no' / 'x.json'}: a file that ends in .yaml is expected, as scenarios name it",
        f"--out {tmp_path / 'no' / 'x.json'}: no such directory: {tmp_path / 'no'}",
        f"--only gem: one of {', '.join(FAMILIES)}",
    ]
    assert "--device: one of cuda, cpu" in sim("calibrate").stderr


def test_without_cuda_it_says_what_to_do() -> None:
    result = sim("calibrate", "--device", "cuda")
    assert result.exit_code == 2
    assert "sees no CUDA device" in result.stderr and "--device cpu" in result.stderr


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    """Also a script alone; and a trace needs no torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')")
    hide = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'torch' else f(n, *a)"
    verb = f"{hide}; sys.argv = ['sim', 'calibrate', '--device', 'cpu']; from sim.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", verb], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'sim[calibrate]'" in done.stderr
    assert "Traceback" not in done.stderr
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    script = [sys.executable, "-m", "calibration.measure.norms"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "pip install 'sim[calibrate]'" in done.stderr
    assert "Traceback" not in done.stderr
    code = "import sys, calibration.own.trace, calibration.own.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_two_ranks_measure_collectives_together(tmp_path: Path) -> None:
    """gloo, two processes, a few seconds: every kind inside the budget, one file."""
    out = tmp_path / "c.points.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "calibration.measure.collectives", "--device", "cpu", "--threads", "1", "--minutes", "0.08"]
    command += ["--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    _, points = read_points(out)
    works = [point.work for point in points if isinstance(point, TimedPoint)]
    assert {work.kind for work in works} == {  # type: ignore[union-attr]
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "ring_exchange",
    }  # fmt: skip
    assert {work.size for work in works} == {2}  # type: ignore[union-attr]


def test_families_are_those_of_the_scripts() -> None:
    assert all(hasattr(__import__(f"calibration.measure.{name}", fromlist=["main"]), "main") for name in FAMILIES)
    assert norms.FAMILY == "norms"
