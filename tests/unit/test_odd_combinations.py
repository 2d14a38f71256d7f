"""Combinations that few people write: they work, or are refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.api import simulate_setup
from sim.report.levers import find_lever
from sim.scenario import ScenarioError, load_text
from tests.unit.scenarios import TINY, sim, write

MEGATRON = """
model: {preset: llama-tiny, implementation: megatron}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 128}
parallel: {data: {degree: 1}}
precision: {parameters: bf16, compute: bf16}
"""
ALONE = """
model: {preset: llama-tiny, implementation: torchtitan}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 128}
optimizer: {zero_grad: start, clip_norm: null}
"""
T5 = """
model: {preset: t5-small, implementation: megatron}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 2}
batch: {micro_batch: 2, seq_len: 96, target_len: 33}
parallel: {tensor: {degree: 2, sequence_parallel: true}}
precision: {parameters: bf16, compute: bf16}
"""


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        load_text(text, overrides=overrides)
    return str(caught.value)


def test_an_activation_is_not_discarded_inside_a_part_that_runs_again() -> None:
    assert "leave one of them out" in refusal(MEGATRON, "checkpoint={inside: mlp, discard: activation}")
    load_text(MEGATRON, overrides=["checkpoint={inside: attention, discard: activation}"])


@pytest.mark.parametrize("override", ["mode=no_grad", "mode=eval", "optimizer.in_backward=true"])
def test_nothing_is_zeroed_where_no_gradients_are_kept(override: str) -> None:
    outcome = simulate_setup(load_text(ALONE, overrides=[override]).strategies[0])
    assert outcome.time is not None and outcome.steady.active_bytes > 0


def test_the_decoders_tokens_are_shared_evenly_too() -> None:
    assert "batch.target_len (33)" in refusal(T5)
    load_text(T5, overrides=["batch.target_len=34"])


def test_no_advice_to_shard_over_one_rank() -> None:
    outcome = simulate_setup(load_text(MEGATRON).strategies[0])
    lever = find_lever(outcome)
    assert lever is None or "distributed_optimizer" not in lever.measure


def test_no_advice_to_use_a_loss_that_the_code_has_not() -> None:
    outcome = simulate_setup(load_text(ALONE.replace("torchtitan", "transformers")).strategies[0])
    lever = find_lever(outcome)
    assert lever is None or "model.loss_chunks" not in lever.measure


def test_damaged_pictures_and_folders_of_simulated_steps_are_answered(tmp_path: Path) -> None:
    assert sim("run", write(tmp_path, TINY, "tiny.yaml"), "--out", tmp_path).exit_code == 0
    folder = tmp_path / "tiny"
    beside = sim("diff", folder / "full", folder / "none")
    assert beside.exit_code == 0 and "Both traces were simulated." in beside.stdout
    assert "--tensor -3" in sim("explain", folder / "full", "--tensor=-3").stderr
    (folder / "full" / "picture.npz").write_bytes(b"")
    result = sim("compare", folder)
    assert result.exit_code == 2 and "picture.npz: cannot be read" in result.stderr
