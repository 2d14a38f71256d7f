"""Multi-token prediction: its parameters, products, losses and place, and what may be asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sim.model.catalogue import build_model as config_of
from sim.model.catalogue import preset_shapes
from sim.model.faults import ModelError
from sim.model.flops import active_parameter_count, model_flops_per_token, parameter_count
from sim.program.kernels import Gemm
from sim.program.program import Phase, Program, Row
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.runtime.train_pipeline import record_pipeline
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal

TEXT = """
model: {preset: mixtral-tiny, implementation: megatron, layers: 8, mtp_layers: DEPTH}
cluster: {gpu: GPU, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 256, accumulation: COUNT}
precision: {parameters: bf16, compute: bf16, fp8: RECIPE}
parallel: PARALLEL
"""
ALONE = "{data: {degree: 8, distributed_optimizer: true}, expert: {degree: 4}}"
STAGES = "{data: {degree: 2}, pipeline: {degree: 4}}"
H, F, V, E, K, HEADS, KV, D = 512, 768, 8192, 8, 2, 8, 2, 64


def setup_of(depth: int, parallel: str = ALONE, recipe: str = "null", count: int = 1) -> Setup:
    text = TEXT.replace("DEPTH", str(depth)).replace("PARALLEL", parallel).replace("RECIPE", recipe)
    text = text.replace("GPU", "b200" if recipe == "mxfp8" else "h100").replace("COUNT", str(count))
    return load_text(text, "mtp").strategies[0]


def products(program: Program, phase: Phase) -> Counter[tuple[str, int, int]]:
    """(last part of the module's path, n, k) of the first micro-batch."""
    found: Counter[tuple[str, int, int]] = Counter()
    stop = next(mark.rows for mark in program.marks if mark.name == "s0.bwd0")
    for row in np.flatnonzero(program.row_kind[:stop] == Row.LAUNCH).tolist():
        work, place = program.kernels[program.row_argument[row]].work, program.where(int(program.row_where[row]))
        if isinstance(work, Gemm) and place[0] == phase:
            found[place[1].rpartition(".")[2], work.n, work.k] += 1
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_a_depth_adds_a_layer_three_norms_and_a_product_of_both_inputs(depth: int) -> None:
    """The embedding's table and the head are the model's own."""
    shapes: dict[str, Any] = preset_shapes("mixtral-tiny")
    plain, deeper = (config_of("mixtral-tiny", shapes, "megatron", {"mtp_layers": n}) for n in (0, depth))
    layer = 2 * H + H * (HEADS + 2 * KV) * D + HEADS * D * H + E * H + E * 3 * H * F
    assert parameter_count(deeper) - parameter_count(plain) == depth * (layer + 3 * H + 2 * H * H)
    idle = (E - K) * 3 * H * F
    assert active_parameter_count(deeper) - active_parameter_count(plain) == depth * (layer - idle + 3 * H + 2 * H * H)
    per_token = 6 * (layer - idle + 3 * H + 2 * H * H + V * H) + 12 * HEADS * D * 256
    assert model_flops_per_token(deeper, 256) - model_flops_per_token(plain, 256) == depth * per_token


def test_the_head_runs_once_per_depth() -> None:
    plain, deeper = (products(record(setup_of(depth), 1), Phase.FORWARD) for depth in (0, 1))
    added = deeper - plain
    assert added["eh_proj", H, 2 * H] == 1
    assert added["output_layer", V, H] == 1
    assert added["linear_qkv", (HEADS + 2 * KV) * D, H] == 1
    back = products(record(setup_of(1), 1), Phase.BACKWARD)
    assert sum(count for (name, _, _), count in back.items() if name == "eh_proj") == 2


def test_the_last_stage_has_it_with_a_table_of_its_own() -> None:
    first, last = (record_pipeline(setup_of(1, STAGES, count=8), rank, 1) for rank in (0, 3))
    assert not any(name == "eh_proj" for name, _, _ in products(first, Phase.FORWARD))
    assert products(last, Phase.FORWARD)["eh_proj", H, 2 * H] == 1


@pytest.mark.parametrize("recipe", ["null", "mxfp8"])
def test_stamped_equals_live(recipe: str) -> None:
    setup = setup_of(1, recipe=recipe)
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


def test_folded_equals_whole() -> None:
    setup = setup_of(1, STAGES, count=24)
    for rank in (0, 3):
        assert_equal(record_pipeline(setup, rank, 3), record_pipeline(setup, rank, 3, stamps=False, folds=False))


def test_only_megatrons_llama_like_models_have_it() -> None:
    for preset, code in (("llama-tiny", "torchtitan"), ("llama-tiny", "transformers"), ("gpt-tiny", "megatron")):
        with pytest.raises(ModelError, match="mtp_layers"):
            config_of(preset, preset_shapes(preset), code, {"mtp_layers": 1})
    with pytest.raises(ModelError, match="mtp_layers"):
        config_of("llama-tiny", preset_shapes("llama-tiny"), "megatron", {"mtp_layers": 4})
