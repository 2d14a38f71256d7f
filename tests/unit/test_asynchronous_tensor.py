"""Asynchronous tensor parallelism: products in pieces beside the transfers of their tokens, as Inductor pairs them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.program.kernels import Gemm
from sim.program.program import COMPUTE, TENSOR, Phase, Program, Row
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems

TEXT = """
model: {preset: llama-tiny, implementation: torchtitan, kv_heads: 8}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: MICRO, seq_len: 256}
precision: {parameters: fp32, compute: bf16, reduce: fp32}
parallel: {fsdp: {degree: DATA}, tensor: {degree: RANKS, sequence_parallel: true, asynchronous: ASYNC}}
compile: {}
"""
H, FLOAT8 = 512, "strategies: {a: {precision: {float8: RECIPE}}}\n"
Meetings = Counter[tuple[str, int, int]]


def text_of(asynchronous: bool, ranks: int = 2, micro: int = 2, more: str = "") -> str:
    text = TEXT.replace("MICRO", str(micro)).replace("RANKS", str(ranks)).replace("DATA", str(8 // ranks))
    return text.replace("ASYNC", str(asynchronous).lower()) + more


def setup_of(asynchronous: bool, ranks: int = 2, micro: int = 2, more: str = "") -> Setup:
    return load_text(text_of(asynchronous, ranks, micro, more), "async").strategies[0]


def meetings(program: Program, phase: Phase, layer: int = 1) -> Meetings:
    """(kind, bytes, stream) of what a layer's tensor-parallel ranks exchange; the norms' gradients left out."""
    found: Meetings = Counter()
    for row in np.flatnonzero(program.row_kind == Row.COLLECTIVE).tolist():
        place, c = program.where(int(program.row_where[row])), program.collectives[program.row_argument[row]]
        if place[0] == phase and place[1].startswith(f"layers.{layer}") and c.group == "tp" and c.kind != "all_reduce":
            found[c.kind, c.bytes, int(program.row_stream[row])] += 1
    return found


def products(program: Program, phase: Phase, layer: int = 1) -> list[Gemm]:
    found = []
    for row in np.flatnonzero(program.row_kind == Row.LAUNCH).tolist():
        place, work = program.where(int(program.row_where[row])), program.kernels[program.row_argument[row]].work
        if place[0] == phase and place[1].startswith(f"layers.{layer}") and isinstance(work, Gemm):
            found.append(work)
    return found


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_products_read_or_make_goes_in_pieces_and_the_rest_meets_as_ever(ranks: int, micro: int) -> None:
    """Forward: two gathers, each read by products, and two products that are summed. Backward: the gradients of the sums
    are gathered for a product each; those of what was gathered are sums of several products, which nothing pairs."""
    program = record(setup_of(True, ranks, micro), 1)
    whole = micro * 256 * H * 2
    pieces = ("ring_exchange", whole // ranks, TENSOR)
    assert meetings(program, Phase.FORWARD) == Counter({pieces: 4 * (ranks - 1)})
    blocking = ("reduce_scatter", whole, COMPUTE)
    assert meetings(program, Phase.BACKWARD) == Counter({pieces: 2 * (ranks - 1), blocking: 2})


@pytest.mark.parametrize("micro", [1, 2])
def test_pieces_do_the_work_of_the_whole(micro: int) -> None:
    """All of forward's products are in pieces, of backward's those of the gathered gradients with the weights."""
    whole, pieces = (record(setup_of(asynchronous, 2, micro), 1) for asynchronous in (False, True))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        one, many = products(whole, phase), products(pieces, phase)
        assert sum(work.flops for work in one) == sum(work.flops for work in many)
        assert len(many) == len(one) + (7 if phase is Phase.FORWARD else 2)
    assert {work.m for work in products(pieces, Phase.FORWARD)} == {micro * 256 // 2}


def test_products_that_read_the_same_tokens_take_each_piece_in_turn() -> None:
    """Queries, keys and values of the rank's own tokens, then of the others'."""
    setup = load_text(text_of(True).replace("kv_heads: 8", "kv_heads: 2"), "gqa").strategies[0]
    work = [gemm.n for gemm in products(record(setup, 1), Phase.FORWARD)][:6]
    q, kv = 8 * 64 // 2, 2 * 64 // 2
    assert work == [q, kv, kv, q, kv, kv]


@pytest.mark.parametrize(("recipe", "gathers"), [("tensorwise", "ring_exchange"), ("rowwise", "all_gather")])
def test_8_bit_tokens_go_in_pieces_only_where_they_are_cast_before_they_are_gathered(recipe: str, gathers: str) -> None:
    """With a scale per row tokens are gathered in 16 bit and then cast: no product reads what was gathered."""
    program = record(setup_of(True, more=FLOAT8.replace("RECIPE", recipe)), 1)
    whole = 2 * 256 * H
    size, stream = (whole // 2, TENSOR) if gathers == "ring_exchange" else (2 * whole, COMPUTE)
    forward = Counter({(gathers, size, stream): 2}) + Counter({("ring_exchange", whole, TENSOR): 2})
    assert meetings(program, Phase.FORWARD) == forward


def test_gradients_are_summed_in_16_bit_whatever_the_tokens_were_sent_in() -> None:
    program = record(setup_of(False, more=FLOAT8.replace("RECIPE", "tensorwise")), 1)
    whole = 2 * 256 * H
    expected = Counter({("all_gather", whole, COMPUTE): 2, ("reduce_scatter", 2 * whole, COMPUTE): 2})
    assert meetings(program, Phase.BACKWARD) == expected


def test_with_selective_recomputation_all_goes_in_pieces_too() -> None:
    """It keeps sums, so that no product that is summed is kept whole; what is made again is gathered again, in pieces."""
    more = "checkpoint: {save: [attention, every_second_matmul]}\n"
    program = record(setup_of(True, more=more), 1)
    pieces = ("ring_exchange", 256 * H * 2, TENSOR)
    assert meetings(program, Phase.FORWARD) == Counter({pieces: 4})
    assert meetings(program, Phase.RECOMPUTE) == Counter({pieces: 2})


@pytest.mark.parametrize("more", ["", "checkpoint: {every: 1}\n", FLOAT8.replace("RECIPE", "tensorwise")])
def test_it_is_faster_for_large_layers_and_takes_no_more_memory(more: str) -> None:
    times, peaks = [], []
    for asynchronous in (False, True):
        text = text_of(asynchronous, 8, 1, more).replace("llama-tiny", "llama-3.1-8b, layers: 2")
        outcome = simulate_setup(load_text(text.replace("seq_len: 256", "seq_len: 8192"), "large").strategies[0])
        assert outcome.time is not None
        times.append(outcome.time.step_ns)
        peaks.append(outcome.steady.active_bytes)
    assert times[1] < times[0]
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize("more", ["", "checkpoint: {every: 1}\n", FLOAT8.replace("RECIPE", "tensorwise")])
def test_stamped_equals_live(more: str) -> None:
    setup = setup_of(True, more=more)
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("compile: {}", "compile: null", "is Inductor's work"),
        ("torchtitan", "megatron", "is torchtitan's"),
        ("asynchronous: true", "asynchronous: 3", ""),
    ],
)
def test_what_does_not_fit_is_told(old: str, new: str, says: str) -> None:
    text = TEXT.replace("MICRO", "1").replace("RANKS", "2").replace("DATA", "4").replace("ASYNC", "true")
    found = problems(text.replace(old, new, 1))
    assert any(where == "parallel.tensor.asynchronous" and says in message for _, where, message in found), found
