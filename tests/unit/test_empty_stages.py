"""Stages that hold the embedding or the head alone, and an MLP without gate."""

from __future__ import annotations

import pytest

from sim.api import simulate_setup
from sim.model.build import build_model
from sim.model.flops import parameter_count
from sim.program.program import Mem, Owner
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal

TEXT = """
model: {preset: llama-tiny, implementation: IMPLEMENTATION, layers: 4, tied_embeddings: false}
cluster: {gpu: h100, gpus_per_node: 6}
batch: {micro_batch: 1, seq_len: 256, accumulation: 12}
precision: {parameters: bf16, compute: bf16}
parallel: {pipeline: {degree: 6, placement: [0, 1, 1, 1, 1, 0]}}
"""
SQUARED = """
model: {preset: llama-tiny, implementation: megatron, layers: 7, activation: ACTIVATION, norm: layer_norm}
cluster: {gpu: h100, gpus_per_node: 2}
batch: {micro_batch: 2, seq_len: 256, accumulation: 2}
precision: {parameters: bf16, compute: bf16}
parallel: {tensor: {degree: 2, sequence_parallel: true}}
"""


def setup_of(text: str, **words: str) -> Setup:
    for name, word in words.items():
        text = text.replace(name.upper(), word)
    return load_text(text, "empty").strategies[0]


@pytest.mark.parametrize("implementation", ["megatron", "torchtitan"])
def test_ends_without_layers_hold_embedding_and_head(implementation: str) -> None:
    setup = setup_of(TEXT, implementation=implementation)
    outcome = simulate_setup(setup)
    config = setup.model
    table = 2 * config.vocab * config.hidden  # type: ignore[union-attr]
    held = [_parameters(setup, rank) for rank in range(6)]
    norm = 2 * config.hidden  # type: ignore[union-attr]
    assert (held[0], held[-1]) == (table, table + norm)
    assert len(outcome.ranks) == 6 and len(set(held[1:-1])) == 1
    assert sum(held) == 2 * parameter_count(config)  # type: ignore[arg-type]


def _parameters(setup: Setup, rank: int) -> int:
    program = record(setup, 1, rank=rank)
    owners = program.owners[program.mem_handle]
    return int(program.mem_bytes[(program.mem_kind == Mem.ALLOC) & (owners == Owner.PARAMETER)].sum())


def test_a_squared_relu_has_no_gate() -> None:
    plain, gated = (setup_of(SQUARED, activation=name) for name in ("squared_relu", "silu"))
    h, f, layers = plain.model.hidden, plain.model.ffn_hidden, plain.model.layers  # type: ignore[union-attr]
    assert parameter_count(gated.model) - parameter_count(plain.model) == layers * h * f  # type: ignore[arg-type]
    shapes = dict(build_model(plain.model, plain.tensor).named_parameters())  # type: ignore[arg-type]
    assert shapes["layers.0.mlp.linear_fc1.weight"].shape == (f // 2, h)
    assert shapes["layers.0.input_layernorm.bias"].shape == (h,)
    assert_equal(record_training(plain, 3), record_training(plain, 3, stamps=False))
