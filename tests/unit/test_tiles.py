"""Long sequences in tiles: the MLP runs tile by tile and once more in backward; beside it Liger's loss under ZeRO-3."""

from __future__ import annotations

import pytest

from sim.api import simulate_setup
from sim.program.kernels import Gemm
from sim.program.program import Phase, Program, Row
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems
from tests.unit.test_ulysses import held_after_forward

TEXT = """
model: {preset: PRESET, implementation: transformers, MODEL}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 1024}
precision: {parameters: bf16, compute: bf16, reduce: bf16}
parallel: PARALLEL
"""
ZERO, FSDP = "{zero: {degree: 8, stage: 3}}", "{fsdp: {degree: 8}}"
LIGER = "fused_linear_cross_entropy"
LAYERS, H, F, V, TOKENS = 4, 512, 1536, 8192, 2 * 1024  # llama-tiny


def text_of(model: str, parallel: str = ZERO, more: str = "", preset: str = "llama-tiny") -> str:
    text = TEXT.replace("MODEL", model or "dropout: 0.0").replace("PARALLEL", parallel).replace("PRESET", preset)
    return text + more


def setup_of(model: str, parallel: str = ZERO, more: str = "") -> Setup:
    return load_text(text_of(model, parallel, more), "tiles").strategies[0]


def works(program: Program, phase: Phase, path: str) -> list[Gemm]:
    """Products launched in a phase below a module."""
    found = []
    for row, (kind, where) in enumerate(zip(program.row_kind.tolist(), program.row_where.tolist())):
        place = program.where(where)
        if kind == Row.LAUNCH and place[0] == phase and place[1].startswith(path):
            work = program.kernels[program.row_argument[row]].work
            if isinstance(work, Gemm):
                found.append(work)
    return found


@pytest.mark.parametrize("parallel", [ZERO, FSDP])
@pytest.mark.parametrize("tiles", [2, 3, 8])
def test_a_tiled_mlp_keeps_its_input_alone(tiles: int, parallel: str) -> None:
    """Else it keeps gate, silu(gate), up and their product."""
    whole, tiled = (record(setup_of(model, parallel), 1) for model in ("", f"mlp_tiles: {tiles}"))
    assert held_after_forward(whole) - held_after_forward(tiled) == LAYERS * 4 * 2 * TOKENS * F


@pytest.mark.parametrize("tiles", [2, 3, 8])
def test_tiles_do_the_work_of_the_whole_and_once_more_in_backward(tiles: int) -> None:
    whole, tiled = (record(setup_of(model), 1) for model in ("", f"mlp_tiles: {tiles}"))
    forward, backward = (
        sum(w.flops for w in works(whole, phase, "layers.1.mlp")) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert forward == 3 * 2 * TOKENS * H * F
    done = works(tiled, Phase.FORWARD, "layers.1.mlp")
    assert (len(done), sum(w.flops for w in done)) == (3 * tiles, forward)
    assert max(w.m for w in done) == 2 * -(-1024 // tiles)  # of both sequences
    assert sum(w.flops for w in works(tiled, Phase.RECOMPUTE, "layers.1.mlp")) == forward
    assert sum(w.flops for w in works(tiled, Phase.BACKWARD, "layers.1.mlp")) == backward


@pytest.mark.parametrize("parallel", [ZERO, FSDP, "{zero: {degree: 8, stage: 1}}"])
def test_gradients_are_reduced_after_the_last_tile(parallel: str) -> None:
    """As many sums of as many bytes as without tiles."""
    sums = []
    for model in ("", "mlp_tiles: 4"):
        program = record(setup_of(model, parallel), 1)
        rows = program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()
        made = (program.collectives[row] for row in rows)
        sums.append([(c.kind, c.bytes) for c in made if c.kind in ("reduce_scatter", "all_reduce")])
    assert sums[0] == sums[1] != []


def test_zero_3_gathers_the_head_with_the_model_whose_forward_reads_it() -> None:
    """Liger's loss calls no head: its weight is an external parameter of the whole model."""
    gathered = []
    for model in ("mlp_tiles: 1", f"liger: [{LIGER}]"):
        program = record(setup_of(model, "{zero: {degree: 8, stage: 3, persistence_threshold: 0}}"), 2)
        rows = program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()
        made = (program.collectives[row] for row in rows)
        gathered.append([c.bytes for c in made if c.kind == "all_gather"])
    assert sum(gathered[1]) == sum(gathered[0])  # once forward, once backward, either way
    assert gathered[1][0] == 2 * V * H


@pytest.mark.parametrize("model", ["mlp_tiles: 3", f"liger: [{LIGER}, swiglu], mlp_tiles: 3"])
@pytest.mark.parametrize("more", ["", "checkpoint: {every: 1}\n", "checkpoint: {every: 1, reentrant: true}\n"])
def test_stamped_equals_live(model: str, more: str) -> None:
    setup = setup_of(model, FSDP, more)
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


def test_both_lower_the_peak_of_a_recomputed_step_under_ulysses() -> None:
    shared = "{zero: {degree: 1, stage: 3}, context: {degree: 8}}"
    peaks = []
    for model in ("", f"liger: [{LIGER}]", f"liger: [{LIGER}], mlp_tiles: 4"):
        setup = load_text(
            text_of(model, shared, "checkpoint: {every: 1}\n").replace("seq_len: 1024", "seq_len: 65536"), "long"
        ).strategies[0]
        peaks.append(simulate_setup(setup).steady.active_bytes)
    assert peaks[0] > peaks[1] > peaks[2]


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (text_of("mlp_tiles: 2", "{ddp: {degree: 8}}"), "model.mlp_tiles", "after the first tile"),
        (text_of("mlp_tiles: 2", "{fsdp1: {degree: 8}}"), "model.mlp_tiles", "after the first tile"),
        (text_of("mlp_tiles: 2", FSDP, "compile: {}\n"), "model.mlp_tiles", "eager mode only"),
        (text_of("mlp_tiles: 2", FSDP, preset="mixtral-tiny"), "model.mlp_tiles", "has experts"),
        (text_of("mlp_tiles: 2").replace("transformers", "torchtitan"), "model.mlp_tiles", "not in torchtitan's llama"),
        (text_of("mlp_tiles: 0"), "model.mlp_tiles", ""),
    ],
)  # fmt: skip
def test_what_tiles_are_not_modelled_with_is_told(text: str, path: str, says: str) -> None:
    found = problems(text)
    assert any(where == path and says in message for _, where, message in found), found
