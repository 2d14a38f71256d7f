"""HybridEP's exchange: who sends how much, what is sorted, saved and refused."""

from __future__ import annotations

from itertools import combinations

import pytest

from sim.model.experts import Experts
from sim.program.kernels import Collective
from sim.program.program import Program, Row
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems

TEXT = """
model: {preset: mixtral-tiny, implementation: megatron, layers: LAYERS, experts: {dispatcher: KIND}}
cluster: {gpu: gb200, gpus_per_node: 4, nodes: 2}
batch: {micro_batch: 2, seq_len: 256}
precision: {parameters: bf16, compute: bf16}
parallel: {data: {degree: 8, distributed_optimizer: true}, expert: {degree: DEGREE}}
"""
H, E, K, TOKENS = 512, 8, 2, 512


def setup_of(kind: str = "flex", degree: int = 4, layers: int = 4) -> Setup:
    text = TEXT.replace("KIND", kind).replace("DEGREE", str(degree)).replace("LAYERS", str(layers))
    return load_text(text, "flex").strategies[0]


def exchanges(program: Program) -> list[Collective]:
    rows = range(next(mark.rows for mark in program.marks if mark.name == "s0.fwd0"))
    made = (program.collectives[program.row_argument[r]] for r in rows if program.row_kind[r] == Row.COLLECTIVE)
    return [collective for collective in made if collective.group == "ep"]


@pytest.mark.parametrize(("count", "top_k", "ranks"), [(8, 2, 4), (8, 3, 2), (6, 2, 6)])
def test_a_token_goes_once_to_each_rank_that_it_reaches(count: int, top_k: int, ranks: int) -> None:
    """The mean over all choices of k experts, counted out."""
    choices = list(combinations(range(count), top_k))
    reached = sum(len({expert // (count // ranks) for expert in choice}) for choice in choices)
    tokens = len(choices)
    assert Experts(count=count, top_k=top_k, ffn_hidden=8).sent_once(tokens, ranks) == pytest.approx(reached, abs=1)


def test_each_way_is_one_exchange_of_distinct_rows() -> None:
    program = record(setup_of(), 1)
    unique = setup_of().model.experts.sent_once(TOKENS, 4)  # type: ignore[union-attr]
    assert unique == -(-TOKENS * 4 * (1 - 15 / 28) // 1)  # 6 of 8 experts elsewhere: 15 of 28 pairs
    sizes = [(c.kind, c.bytes) for c in exchanges(program)]
    layer = [("all_gather", 4 * TOKENS * E)] + 2 * [("all_to_all", unique * H * 2)]
    assert sizes == 4 * layer
    plain = [c.bytes for c in exchanges(record(setup_of("alltoall"), 1)) if c.bytes > TOKENS * K * 8]
    assert plain == 8 * [TOKENS * K * H * 2]


def test_alone_a_rank_exchanges_nothing() -> None:
    assert not exchanges(record(setup_of(degree=1), 1))
    assert_equal(record_training(setup_of(degree=1), 1), record_training(setup_of("alltoall", degree=1), 1))


def test_stamped_equals_live() -> None:
    setup = setup_of(layers=8)
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


def test_what_is_not_modelled_is_told() -> None:
    text = TEXT.replace("KIND", "flex, capacity_factor: 1").replace("DEGREE", "4").replace("LAYERS", "4")
    assert any("without capacity_factor" in message for _, _, message in problems(text))
    shared = TEXT.replace("KIND", "flex").replace("LAYERS", "4").replace("DEGREE", "4, tensor: 2")
    shared = shared.replace("{data: {degree: 8", "{tensor: {degree: 2, sequence_parallel: true}, data: {degree: 4")
    shared = shared.replace("expert: {degree: 4, tensor: 2}", "expert: {degree: 2, tensor: 2}")
    assert any("one rank per expert" in message for _, _, message in problems(shared))
