"""The loop on this machine: bytes and operators of real steps are the simulated ones; times are added up as they should."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calibration.check import command, loop
from calibration.check.host import learn
from calibration.check.kept import Kept
from calibration.check.loop import Request, check_cpu
from calibration.check.operators import operands, recipe_of
from calibration.check.outcome import Line, Outcome
from calibration.check.plan import FAMILIES, LEARNT_FROM, SELECTIVE, SHORT, STRATEGIES, strategies_of
from calibration.check.pool import Pool
from calibration.check.predict import HostCosts, host_work, launches, predicted_ns, predicted_peak_bytes, program_of
from calibration.check.rounds import AGAIN, LOOP_KEY, Group, operator_key
from calibration.check.step import TrainingStep
from sim.cost.figures import CostError

BATCH = 2
SAME_NAME = (
    "aten::mm", "aten::addmm", "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::gelu",
    "aten::gelu_backward", "aten::silu", "aten::silu_backward", "aten::_log_softmax", "aten::nll_loss_forward",
    "aten::rsqrt", "aten::cat", "aten::embedding", "aten::embedding_dense_backward", "aten::_fused_adamw_",
)  # fmt: skip
"""Operators that have the simulator's name, and that a dispatch mode does not change (it stops accumulation in place)."""
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
CASES = [(family, name) for family in FAMILIES for name in STRATEGIES]


class Seen(TorchDispatchMode):
    """Counts operators by name. Where recomputation stops at an operator's inputs, it is not run, and not seen here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.counts[function.name().partition(".")[0]] += 1
        return function(*arguments, **(keywords or {}))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return check_cpu(Request(short=True, keep=tmp_path_factory.mktemp("check") / "rounds.jsonl"))


def test_every_peak_is_the_simulated_one(outcome: Outcome) -> None:
    assert [line for line in outcome.checked if not line.bytes_equal] == []
    assert len(outcome.checked) == len(CASES) * 2
    assert outcome.bytes_equal


def test_every_line_has_times_and_a_control_stands_beside_them(outcome: Outcome) -> None:
    assert all(line.predicted_ns > 0 and line.measured_ns > 0 for line in outcome.lines)
    assert sum(line.control for line in outcome.lines) == 4
    assert outcome.rounds == loop.SHORT_ROUNDS and outcome.finished
    json.dumps(outcome.as_dict())


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_real_step_runs_the_simulated_operators(family: str, name: str) -> None:
    setup = next(s for s in strategies_of(family, SHORT, BATCH) if s.name == name)
    simulated: Counter[str] = Counter()
    for work, count in launches(program_of(setup)).items():
        simulated[work.name.removesuffix(" (causal)")] += count
    step = TrainingStep(setup)
    step()
    with Seen() as seen:
        step()
    real = seen.counts
    names = (*SAME_NAME, FLASH, f"{FLASH}_backward")
    assert {n: simulated[n] for n in names} == {n: real.get(n, 0) for n in names}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_steady_step_takes_its_kernels_and_host_work_one_after_the_other(family: str) -> None:
    """On a CPU nothing overlaps."""
    host = HostCosts(operator_us=3, checkpoint_region_us=500, selective_policy_us=40, optimizer_loop_us=7)
    for setup in strategies_of(family, SHORT, BATCH):
        program = program_of(setup)
        works = {k.work: 1000.0 + 7 * i for i, k in enumerate(program.kernels)}
        kernels = sum(count * works[work] for work, count in launches(program).items())
        spent = sum(getattr(host, f"{n}_us", 0) * 1000 * count for n, count in host_work(program).items())
        assert predicted_ns(setup, program, works, host) == kernels + spent  # type: ignore[arg-type]


def test_an_operator_without_a_time_is_refused() -> None:
    setup = strategies_of("gpt", SHORT, BATCH)[0]
    with pytest.raises(CostError, match="no form prices it"):
        predicted_ns(setup, program_of(setup), {}, HostCosts())


def test_host_costs_are_found_again() -> None:
    """Steps of which they are made up exactly give them back."""
    host = HostCosts(operator_us=3, checkpoint_region_us=500, selective_policy_us=40, optimizer_loop_us=7)
    kept = Kept(None, {})
    groups = [Group(family, strategies_of(family, LEARNT_FROM, BATCH), kept) for family in FAMILIES]
    kept.samples[LOOP_KEY] = [7000.0]
    for group in groups:
        times = dict.fromkeys(group.operators, 2000.0)
        kept.samples |= {operator_key(work): [ns] for work, ns in times.items()}
        for setup in group.setups:
            kept.samples[group.key(setup.name)] = [predicted_ns(setup, group.programs[setup.name], times, host)]
    found = learn(groups)
    for name in HostCosts.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(host, name), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_has_a_recipe_that_makes_what_the_tape_says(family: str) -> None:
    pool = Pool(1 << 20)
    for setup in strategies_of(family, SHORT, BATCH):
        for kernel in program_of(setup).kernels:
            work = kernel.work
            made = recipe_of(work).run(work)(operands(work, pool))  # type: ignore[arg-type]
            if isinstance(made, torch.Tensor) and work.out is not None:  # type: ignore[union-attr]
                assert made.numel() == prod(work.out.shape), work  # type: ignore[union-attr]


def test_the_pool_gives_new_bytes_until_it_is_used_up() -> None:
    pool = Pool(1 << 12)
    setup = strategies_of("llama", SHORT, 1)[0]
    layout = next(k.work.reads[0] for k in program_of(setup).kernels if k.name == "aten::rsqrt")  # type: ignore[union-attr]
    first, second = pool.take([layout, layout], 2)
    assert first.data_ptr() != second.data_ptr() and tuple(first.shape) == layout.shape
    last = [pool.take([layout], 2)[0].data_ptr() for _ in range(64)]
    assert first.data_ptr() in last


def test_rounds_are_kept_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first round: what was measured counts, and the next run measures the rest."""
    file = tmp_path / "rounds.jsonl"
    one_round, ran = loop._Loop._round, 0

    def interrupted(self: loop._Loop, *arguments: int) -> None:
        nonlocal ran
        ran += 1
        if ran == 2:
            raise KeyboardInterrupt
        one_round(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop._Loop, "_round", interrupted)
    monkeypatch.setattr(loop, "SHORT_ROUNDS", 2)
    monkeypatch.setattr(loop, "SHORT_BATCHES", (1,))
    first = check_cpu(Request(short=True, keep=file))
    assert (first.rounds, first.finished) == (1, False)
    with file.open("a") as text:
        text.write('{"cut sho')
    second = check_cpu(Request(short=True, keep=file))
    assert (second.rounds, second.finished, ran) == (2, True, 3)
    assert [line.measured_peak_bytes for line in first.lines] == [line.measured_peak_bytes for line in second.lines]
    with pytest.raises(ValueError, match="another machine or setting"):
        check_cpu(Request(short=True, threads=2, keep=file))


def line(**changes: object) -> Line:
    fields = {"network": "gpt", "batch": 1, "strategy": SELECTIVE, "predicted_ns": 110.0, "measured_ns": 100.0,
              "spread": 0.1, "predicted_slowdown": 1.1, "measured_slowdown": 1.0, "predicted_peak_bytes": 5,
              "measured_peak_bytes": 5}  # fmt: skip
    return Line(**(fields | changes))  # type: ignore[arg-type]


def test_the_exit_code_gates_bytes_and_if_asked_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"device": "d", "threads": 1, "torch": "t"}
    good = Outcome(machine=facts, rounds=3, lines=[line()], host={"operator_us": 1.0})
    bad = replace(good, lines=[line(measured_peak_bytes=4)])
    for answer, strict, code in ((good, False, 0), (good, True, 1), (bad, False, 1)):
        monkeypatch.setattr(command, "with_progress", lambda _, answer=answer: answer)
        assert command.run(Request(), as_json=True, strict=strict) == code
        found = json.loads(capsys.readouterr().out)
        assert found["lines"][0]["error"] == pytest.approx(0.1)
    assert command.run(Request(), as_json=False, strict=False) == 1  # the last answer: bytes differ
    assert "DIFFER: gpt 1 selective" in capsys.readouterr().out


def test_the_control_is_a_second_plain(outcome: Outcome) -> None:
    assert [x.strategy for x in outcome.lines[:5]] == [*STRATEGIES, AGAIN]


def test_peaks_of_the_whole_form_are_predicted_too() -> None:
    """The networks that host costs are learnt from and those of the whole check are recorded in full."""
    for family in FAMILIES:
        assert predicted_peak_bytes(program_of(strategies_of(family, LEARNT_FROM, 1)[0])) > 0
