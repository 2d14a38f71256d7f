"""Bytes per layer and rank against the closed forms of Korthikanti et al. 2022, compared with ==.

What a layer keeps beyond the closed forms is named: two layer norms with a mean and a reciprocal deviation per token in
fp32. Cases ST-01, ST-02, AC-01, AC-02: figures of calculon-ai/calculon's validation, from the paper's figures 1 and 7.
"""

from __future__ import annotations

import pytest

from sim.program.program import Owner
from sim.runtime.record import record
from sim.scenario import load_text
from tests.published.korthikanti import CASES, Case, alive_bytes, bytes_per_layer, saved_per_layer

GIB = 1 << 30
STATE = (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER)
IDS = [case.preset for case in CASES]
STATES_GIB = (45.5625, 45.5625, 31.640625, 32.958984375)
NONE_GIB = (59.25, 66.84375, 114.0234375, 131.25)
BOTH_GIB = (9.5625, 12.3515625, 23.076171875, 26.5625)
SHARES = {
    "sp": (66.8, 62.0, 58.3, 58.3),
    "selective": (49.4, 56.5, 62.0, 62.0),
    "selective-sp": (16.2, 18.5, 20.3, 20.3),
    "full": (7.6, 8.7, 9.4, 9.4),
}


def statistics(case: Case, strategy: str) -> int:
    """16 sb bytes: mean and reciprocal deviation of two norms, fp32, of the rank's tokens; none under full recompute."""
    whole = 0 if strategy.startswith("full") else 16 * case.s * case.b
    return whole // case.t if strategy.endswith("sp") else whole


def closed_form(case: Case, strategy: str) -> int:
    """The paper's equations 2, 4, 5 and 6, and its table 2, in bytes per layer and rank."""
    s, b, h, a, t = case.s, case.b, case.h, case.a, case.t
    sbh, attention = s * b * h, 5 * a * s * s * b
    return {
        "none": 10 * sbh + 24 * sbh // t + attention // t,
        "sp": (34 * sbh + attention) // t,
        "selective": 10 * sbh + 24 * sbh // t,
        "selective-sp": 34 * sbh // t,
        "full": 2 * sbh,
        "full-sp": 2 * sbh // t,
    }[strategy]


def first_stage_gib(case: Case, strategy: str) -> float:
    """Activations of the first pipeline stage from the simulated layer, less the named terms."""
    layer = saved_per_layer(case, strategy) - statistics(case, strategy)
    return layer * case.layers * case.interleaving / GIB


@pytest.mark.parametrize("strategy", ["none", "sp", "selective", "selective-sp", "full", "full-sp"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_layer_saves_the_closed_form_and_the_statistics_of_its_norms(case: Case, strategy: str) -> None:
    assert saved_per_layer(case, strategy) - closed_form(case, strategy) == statistics(case, strategy)


@pytest.mark.parametrize(("case", "published"), list(zip(CASES, NONE_GIB, strict=True)), ids=IDS)
def test_activations_without_recomputation_are_those_of_figure_1(case: Case, published: float) -> None:
    assert first_stage_gib(case, "none") == published


@pytest.mark.parametrize(("case", "published"), list(zip(CASES, BOTH_GIB, strict=True)), ids=IDS)
def test_activations_with_sequence_parallelism_and_selective_recomputation_are_those_of_figure_1(
    case: Case, published: float
) -> None:
    assert first_stage_gib(case, "selective-sp") == published


@pytest.mark.parametrize("strategy", SHARES)
def test_shares_of_the_activations_without_recomputation_are_those_of_figure_7(strategy: str) -> None:
    for case, published in zip(CASES, SHARES[strategy], strict=True):
        share = (saved_per_layer(case, strategy) - statistics(case, strategy)) / closed_form(case, "none")
        assert abs(100 * share - published) <= 0.2, (case.preset, share)


@pytest.mark.parametrize(("case", "published"), list(zip(CASES, STATES_GIB, strict=True)), ids=IDS)
def test_states_of_a_rank_are_18_bytes_per_parameter_of_its_layers(case: Case, published: float) -> None:
    per_layer = bytes_per_layer(case, "none", "s0.end", STATE, more="")
    h, t = case.h, case.t
    biases, norms = (3 * h + 4 * h) // t + 2 * h, 4 * h
    matrices = per_layer - 18 * (biases + norms)
    assert matrices == 18 * 12 * h * h // t
    assert matrices * case.layers / case.p / GIB == published


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_distributed_optimizer_keeps_6_and_12_over_d_bytes_per_parameter(degree: int, distributed: bool) -> None:
    text = (
        "model: {preset: gpt-tiny, implementation: megatron}\nbatch: {micro_batch: 1, seq_len: 128}\n"
        f"cluster: {{gpu: a100, gpus_per_node: {degree}}}\nprecision: {{parameters: bf16, compute: bf16}}\n"
        f"parallel: {{data: {{degree: {degree}, distributed_optimizer: {str(distributed).lower()}}}}}\n"
    )
    program = record(load_text(text, "st-02").strategies[0], steps=1)
    parameters = alive_bytes(program, "init", (Owner.PARAMETER,)) // 2
    assert parameters % (128 * degree) == 0  # nothing is filled up
    expected = 6 * parameters + 12 * parameters // degree if distributed else 18 * parameters
    assert alive_bytes(program, "s0.end", STATE) == expected
