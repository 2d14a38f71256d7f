"""The textbook's pipelines, played on chains of equal layers without communication; times and bytes compared with ==.

p ranks, v stages per rank, m micro-batches; F and B are the times of a rank's whole forward and backward.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from sim.api import Outcome, play_time, simulate
from sim.engine.memory import play_memory
from sim.program.program import Row
from sim.runtime.record import record
from sim.scenario import load_text

LAYERS, ACTIVATION = 16, 1 << 20
FORWARD_US, BACKWARD_US = 10, 20


def played(
    schedule: str, p: int, m: int, v: int = 1, *, layers: int = LAYERS, weight_us: int = 10, more: str = ""
) -> Outcome:
    gpus = p
    return simulate(
        load_text(
            f"""
model: {{chain: {{layers: {layers}, entry: 0 B, activation: 1 MiB, forward: {FORWARD_US} us, backward: {BACKWARD_US} us,
                weight_gradient: {weight_us} us}}}}
cluster: {{gpu: h100, gpus_per_node: {gpus}}}
batch: {{micro_batch: 1, seq_len: 1, accumulation: {m}}}
parallel: {{pipeline: {{degree: {p}, schedule: {schedule}, virtual: {v}{more}}}}}
""",
            "pipeline",
        )
    ).outcomes[0]


def step_us(outcome: Outcome) -> Fraction:
    assert outcome.time is not None
    return Fraction(outcome.time.step_ns) / 1000


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_the_bubble_is_p_minus_1_over_m(schedule: str, p: int, m: int) -> None:
    """Narayanan et al. 2021, section 2.2."""
    outcome = played(schedule, p, m)
    assert outcome.bubble_fraction == (p - 1) / m
    assert step_us(outcome) == (m + p - 1) * LAYERS // p * (FORWARD_US + BACKWARD_US)


@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first"])
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (2, 4, 4), (4, 4, 2), (4, 8, 2), (4, 8, 4)])
def test_interleaving_divides_the_bubble_by_v(schedule: str, p: int, m: int, v: int) -> None:
    assert played(schedule, p, m, v).bubble_fraction == (p - 1) / (v * m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("weight_us", [5, 10])
def test_zb_h1_fills_the_bubble_with_weight_gradients(p: int, m: int, weight_us: int) -> None:
    """Qi et al. 2024, table 2: (p - 1)(F + I - W) instead of (p - 1)(F + I + W)."""
    outcome = played("zb-h1", p, m, weight_us=weight_us)
    per_layer = FORWARD_US + (BACKWARD_US - weight_us) - weight_us
    ideal = m * LAYERS // p * (FORWARD_US + BACKWARD_US)
    assert step_us(outcome) == ideal + (p - 1) * LAYERS // p * per_layer


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_zb_v_has_no_bubble_where_all_passes_take_equally_long(p: int, m: int) -> None:
    assert played("zb-v", p, m, 2).bubble_fraction == 0.0


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_the_first_stage_holds_as_much_as_all_layers_whatever_p(p: int) -> None:
    """1F1B: p micro-batches of L/p layers."""
    outcome = played("1f1b", p, max(16, p))
    assert outcome.ranks[0].steady.allocated_bytes == LAYERS * ACTIVATION
    assert outcome.worst is outcome.ranks[0]
    for rank, held in enumerate(outcome.ranks):
        assert held.in_flight == p - rank
        assert held.steady.allocated_bytes == (p - rank) * LAYERS // p * ACTIVATION


def test_gpipe_holds_every_micro_batch() -> None:
    for rank in played("gpipe", 4, 8).ranks:
        assert rank.steady.allocated_bytes == 8 * LAYERS // 4 * ACTIVATION


@pytest.mark.parametrize(("p", "v"), [(4, 2), (4, 4), (8, 2)])
def test_interleaving_holds_more(p: int, v: int) -> None:
    """1 + (p - 1) / (p v) times as much on the first rank (Narayanan et al. 2021; DualPipe#15), by whole chunks."""
    outcome = played("interleaved", p, 2 * p, v, layers=p * v)
    assert outcome.ranks[0].steady.allocated_bytes == (p * v + p - 1) * ACTIVATION


def test_zb_v_holds_what_1f1b_holds_on_its_first_rank_on_all_ranks() -> None:
    """sail-sg/zero-bubble#36: 8 ranks, 8 x 4-layer activations."""
    first = played("1f1b", 8, 16, layers=32).ranks[0].steady.allocated_bytes
    assert {rank.steady.allocated_bytes for rank in played("zb-v", 8, 16, 2, layers=32).ranks} == {first}


def test_the_heaviest_stage_decides() -> None:
    """Layers 1, 2, 2, 3: the last stage works three times as long as the first, and sets the pace."""
    m = 8
    outcome = played("1f1b", 4, m, layers=8, more=", placement: [1, 2, 2, 3]")
    assert [rank.steady.allocated_bytes // ACTIVATION for rank in outcome.ranks] == [4 * 1, 3 * 2, 2 * 2, 1 * 3]
    assert outcome.worst is outcome.ranks[1]
    fill_and_drain = (1 + 2 + 2) * (FORWARD_US + BACKWARD_US)
    assert step_us(outcome) == m * 3 * (FORWARD_US + BACKWARD_US) + fill_and_drain
    assert outcome.bubble_fraction == Fraction(int(4 * step_us(outcome)), m * 8 * 30) - 1


RECOMPUTED = """
model: {chain: {layers: 8, entry: 1 MiB, activation: 4 MiB, forward: 10 us, backward: 20 us}}
cluster: {gpu: h100, gpus_per_node: 4}
batch: {micro_batch: 1, seq_len: 1, accumulation: 8}
parallel: {pipeline: {degree: 4}}
checkpoint: {every: 1, keep_micro_batches: KEPT}
"""


def recomputed(kept: int) -> Outcome:
    return simulate(load_text(RECOMPUTED.replace("KEPT", str(kept)), "recomputed")).outcomes[0]


def test_recomputation_under_a_pipeline_lengthens_the_backward() -> None:
    outcome = recomputed(0)
    assert outcome.bubble_fraction == 3 / 8
    assert step_us(outcome) == (8 + 3) * 2 * (10 + 20 + 10)
    assert outcome.ranks[0].steady.allocated_bytes == (4 * 2 * 1 + 4) << 20  # four times two entries, one layer again


def test_only_micro_batches_that_do_not_fit_are_recomputed() -> None:
    """Korthikanti et al. 2022, appendix C: the last rank has one in flight, the first has four."""
    for kept in range(1, 5):
        outcome = recomputed(kept)
        again = [rank.time.recompute_ns > 0 for rank in outcome.ranks if rank.time is not None]
        assert again == [4 - rank > kept for rank in range(4)]
        whole, entries = 2 * 4, 2 * 1
        held = [min(4 - rank, kept) * whole + max(4 - rank - kept, 0) * entries for rank in range(4)]
        found = [rank.steady.allocated_bytes >> 20 for rank in outcome.ranks]
        assert all(most <= bytes_held <= most + 4 for most, bytes_held in zip(held, found))
        assert step_us(outcome) <= step_us(recomputed(kept - 1))
    assert step_us(recomputed(4)) == (8 + 3) * 2 * (10 + 20)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 13), (8, 16)])
def test_zb_h2_leaves_no_rank_idle_between_its_first_and_its_last_pass(p: int, m: int) -> None:
    """Qi et al. 2024, table 2: 2 p - 1 micro-batches in memory, (p - 1)(F + I - 2 W) = 0 of bubble for equal passes."""
    setup = played("zb-h2", p, m).setup
    programs = [record(setup, 2, rank=rank) for rank in range(p)]
    memories = [play_memory(program, "", 1 << 40, 1 << 40, setup.torch) for program in programs]
    for program, lanes in zip(programs, play_time(setup, programs, memories)):
        begin = next(mark.rows for mark in program.marks if mark.name == "s0.end")
        kernels = begin + np.flatnonzero(program.row_kind[begin:] == Row.LAUNCH)
        span_ns = lanes.end_ns[kernels].max() - lanes.start_ns[kernels].min()
        assert span_ns == m * LAYERS // p * (FORWARD_US + BACKWARD_US) * 1000
