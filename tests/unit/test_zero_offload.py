"""DeepSpeed's ZeRO-Offload and ZeRO-Infinity: bytes each way, what the CPU and the drives take, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.api import Outcome, cost_model, simulate_setup
from sim.hardware.drives import Drives
from sim.program.kernels import CPU_MEMORY, HostWork
from sim.scenario import ScenarioError, load_text

TEXT = """
model: {preset: llama-3.2-1b, implementation: torchtitan, layers: 2, tied_embeddings: true}
cluster: {gpu: a100-sxm-80gb, gpus_per_node: 4}
batch: {micro_batch: 1, seq_len: 512}
precision: {parameters: bf16, compute: bf16, reduce: bf16}
parallel: {zero: {degree: 4, stage: 3}}
strategies:
  plain:   {}
  stage_2: {parallel: {zero: {stage: 2, offload_optimizer: cpu}}}
  cpu:     {parallel: {zero: {offload_optimizer: cpu}}}
  params:  {parallel: {zero: {offload_optimizer: cpu, offload_param: cpu}}}
  nvme:    {parallel: {zero: {offload_optimizer: nvme, sub_group_size: 20000000}}}
  ahead:   {parallel: {zero: {offload_optimizer: nvme, sub_group_size: 20000000, pipeline_read: true, pipeline_write: true}}}
"""
PARAMETERS = 128256 * 2048 + 2 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048) + 2048
PART = PARAMETERS // 4


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {setup.name: simulate_setup(setup) for setup in load_text(TEXT).strategies}


def test_the_fp32_part_and_moments_are_not_on_the_device(outcomes: dict[str, Outcome]) -> None:
    """12 bytes less for each parameter of the part, and 2 for the parts of the gradients; then those of the parameters."""
    plain, cpu, params = (outcomes[name].steady.allocated_bytes for name in ("plain", "cpu", "params"))
    held = {name: owners(outcomes[name]) for name in ("plain", "cpu", "params")}
    assert held["plain"]["optimizer"] - held["cpu"]["optimizer"] == 12 * PART
    assert held["cpu"]["optimizer"] == 0
    assert held["cpu"]["parameters"] - held["params"]["parameters"] == 2 * PART
    assert plain > cpu > params


def owners(outcome: Outcome) -> dict[str, int]:
    """Bytes of large blocks that are held when a step has ended, by owner."""
    from sim.program.program import Mem, Owner

    program, live = outcome.program, dict[int, int]()
    for kind, handle, size in zip(program.mem_kind.tolist(), program.mem_handle.tolist(), program.mem_bytes.tolist()):
        if kind == Mem.ALLOC:
            live[handle] = size
        elif kind == Mem.FREE:
            del live[handle]
    result = {"optimizer": 0, "parameters": 0}
    for handle, size in live.items():
        for name, owner in (("optimizer", Owner.OPTIMIZER), ("parameters", Owner.PARAMETER)):
            result[name] += size * (program.owners[handle] == owner and size > 4)
    return result


@pytest.mark.parametrize(("name", "out", "back"), [("stage_2", 4, 2), ("cpu", 6, 4)])
def test_bytes_each_way_for_a_parameter_of_the_part(
    name: str, out: int, back: int, outcomes: dict[str, Outcome]
) -> None:
    """Stage 2: a gradient leaves in fp32, the parameter comes back in 16 bit. Stage 3: the gradient leaves in 16 bit too,
    and comes back for its norm."""
    copies = outcomes[name].copies
    assert copies is not None
    assert (copies.out_bytes, copies.back_bytes) == (out * PART, back * PART)
    assert copies.written_bytes == copies.read_bytes == 0


def test_the_cpu_steps_scales_and_converts(outcomes: dict[str, Outcome]) -> None:
    """Seven fp32 tensors, two more for the scale, six bytes for the copy in 16 bit: 42 bytes for each parameter."""
    mib = sum(-(-tensors * PART // (1 << 20)) for tensors in (7 * 4, 2 * 4, 6))
    for name in ("stage_2", "cpu"):
        copies = outcomes[name].copies
        assert copies is not None
        expected = cost_model(outcomes[name].setup).host_work_ns(HostWork(CPU_MEMORY, mib), 4)
        assert copies.cpu_step_ns == pytest.approx(expected, rel=1e-12)


def test_ranks_of_a_node_share_its_memory_when_they_step() -> None:
    """One alone is as fast as the process can be; of 4 each gets no more than a quarter of 65 GB/s, of 8 an eighth."""
    cost = cost_model(load_text(TEXT).strategies[0])
    work = HostWork(CPU_MEMORY, 1 << 10)
    alone, four, eight = (cost.host_work_ns(work, gpus) for gpus in (1, 4, 8))
    assert alone == (1 << 10) * 27_500
    assert (four, eight) == (round((1 << 30) / (65e9 / 4) * 1e9), round((1 << 30) / (65e9 / 8) * 1e9))


def test_drives_are_read_and_written_16_bytes_for_each_parameter(outcomes: dict[str, Outcome]) -> None:
    """Read: part, moments and gradient; written: gradient, then part and moments. Gradients below 1 MiB stay."""
    for name in ("nvme", "ahead"):
        copies = outcomes[name].copies
        assert copies is not None
        assert copies.read_bytes == 16 * PART
        small = 4 * (5 * 2048 // 4 + 2 * 2 * 512 * 2048 // 4)  # norms, and the projections of keys and values
        assert copies.written_bytes == 16 * PART - small + 4 * 2 * 2 * 512 * 2048 // 4
        share = outcomes[name].setup.cluster.drives.share(outcomes[name].setup.mesh)
        assert copies.read_bytes_per_s == pytest.approx(share[0], rel=0.02)
        assert copies.written_bytes_per_s == pytest.approx(share[1], rel=0.03)


def test_pipelining_hides_the_step_of_the_cpu_and_what_is_read(outcomes: dict[str, Outcome]) -> None:
    one_by_one, ahead = outcomes["nvme"], outcomes["ahead"]
    assert one_by_one.time is not None and ahead.time is not None
    assert one_by_one.copies is not None and ahead.copies is not None
    written_ns = 12 * PART / one_by_one.setup.cluster.drives.share(one_by_one.setup.mesh)[1] * 1e9
    assert ahead.time.step_ns < one_by_one.time.step_ns
    assert ahead.time.step_ns > written_ns
    assert ahead.copies.drive_wait_ns < one_by_one.copies.drive_wait_ns


def test_twice_the_drives_take_half_the_time() -> None:
    setup = load_text(TEXT).strategies[4]
    drives = setup.cluster.drives
    twice = replace(
        drives, read_bytes_per_s=2 * drives.read_bytes_per_s, write_bytes_per_s=2 * drives.write_bytes_per_s
    )
    slow, fast = (
        simulate_setup(replace(setup, cluster=replace(setup.cluster, drives=d))).copies for d in (drives, twice)
    )
    assert slow is not None and fast is not None
    assert fast.read_busy_ns == pytest.approx(slow.read_busy_ns / 2, rel=0.01)


def test_parameters_on_drives_are_read_for_every_gather_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for nothing in main memory; parts below 1 MiB stay there."""
    monkeypatch.setattr("sim.runtime.sharding.zero_drive.MOST_IN_MEMORY", 0)
    parallel = (
        "parallel.zero={offload_optimizer: nvme, offload_param: nvme, max_reuse_distance: 0, degree: 4, stage: 3}"
    )
    outcome = simulate_setup(load_text(TEXT.split("strategies:")[0], overrides=[parallel]).strategies[0])
    base = simulate_setup(load_text(TEXT).strategies[4])
    assert outcome.copies is not None and base.copies is not None
    matrices = 2 * (2 * 2048 * 2048 + 3 * 8192 * 2048) // 4
    embedding = 128256 * 2048 // 4
    assert outcome.copies.written_bytes - base.copies.written_bytes == 2 * (matrices + embedding)
    assert outcome.copies.read_bytes - base.copies.read_bytes >= 2 * (2 * matrices + embedding)
    assert outcome.node_nvme_bytes == 4 * (16 * PART + 2 * (matrices + embedding))


def test_drives_that_are_too_small_are_said(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["nvme"]
    assert outcome.fits_nvme and outcome.node_nvme_bytes == 4 * 16 * PART
    small = Drives(read_bytes_per_s=1e9, write_bytes_per_s=1e9, capacity_bytes=1 << 30)
    setup = replace(outcome.setup, cluster=replace(outcome.setup.cluster, drives=small))
    assert not replace(outcome, setup=setup).fits_nvme


def test_clusters_say_their_drives() -> None:
    overrides = ["cluster.nvme=30 TB", "cluster.nvme_read=25 GB/s"]
    cluster = load_text(TEXT, overrides=overrides).strategies[0].cluster
    assert (cluster.drives.capacity_bytes, cluster.drives.read_bytes_per_s) == (30 * 10**12, 25 * 10**9)
    assert cluster.drives.write_bytes_per_s == 4 * 4 * 10**9
    assert cluster.source("drives").label == "given"
    assert load_text(TEXT).strategies[0].cluster.source("drives").label == "assumed"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("parallel.zero={stage: 2, offload_param: cpu, offload_optimizer: cpu}", "has whole parameters on every GPU"),
        ("parallel.zero.offload_param=cpu", "add offload_optimizer: cpu"),
        ("parallel.zero={stage: 2, offload_optimizer: nvme}", "stage 2 keeps states in main memory"),
        ("parallel.zero={offload_optimizer: cpu, pipeline_read: true}", "needs offload_optimizer: nvme"),
        ("parallel.zero.offload_optimizer=disk", "one of cpu, nvme"),
    ],
)
def test_offload_that_cannot_be_is_a_problem(change: str, expected: str) -> None:
    said = told([change])
    assert expected in said, said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("optimizer.name=sgd", "only adamw is modelled"),
        ("optimizer.variant=foreach", "is fused"),
        ("optimizer.in_backward=true", "is modelled on one GPU only, not under zero"),
        ("optimizer.offload=states", "DeepSpeed's is parallel.zero.offload_optimizer"),
    ],
)
def test_other_optimizers_are_a_problem(change: str, expected: str) -> None:
    assert expected in told(["parallel.zero.offload_optimizer=cpu", change])


def told(overrides: list[str]) -> str:
    with pytest.raises(ScenarioError) as raised:
        load_text(TEXT.split("strategies:")[0], overrides=overrides)
    return str(raised.value)
