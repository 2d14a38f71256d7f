"""torchtitan's tensor and context parallelism under FSDP2: who holds what, who meets when, eager and compiled."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.model.build import build_model
from sim.program.program import Phase, Program, Row
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.runtime.train_pipeline import record_pipeline
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems

TEXT = """
model: {preset: llama-tiny, implementation: torchtitan, layers: 7}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 256, accumulation: ACCUMULATION}
precision: {parameters: fp32, compute: bf16, reduce: fp32}
parallel: PARALLEL
"""
TENSOR = "{fsdp: {degree: 4}, tensor: {degree: 2, sequence_parallel: true}}"
BOTH = "{fsdp: {degree: 2}, tensor: {degree: 2, sequence_parallel: true}, context: {degree: 2}}"
CONTEXT = "{fsdp: {degree: 4}, context: {degree: 2}}"
FORMS = {
    "eager": "",
    "full": "checkpoint: {every: 1}\n",
    "selective": "checkpoint: {save: [attention, every_second_matmul]}\n",
    "compiled": "compile: {}\n",
    "compiled, selective": "compile: {}\ncheckpoint: {save: [attention, every_second_matmul]}\n",
    "compiled, tensorwise": "compile: {}\nstrategies: {a: {precision: {float8: tensorwise}}}\n",
    "compiled, rowwise": "compile: {}\nstrategies: {a: {precision: {float8: rowwise}}}\n",
}


def setup_of(parallel: str, more: str = "", accumulation: int = 2) -> Setup:
    text = TEXT.replace("PARALLEL", parallel).replace("ACCUMULATION", str(accumulation))
    return load_text(text + more, "titan").strategies[0]


def meetings(program: Program, phase: Phase, group: str, path: str = "") -> Counter[str]:
    found: Counter[str] = Counter()
    for row in np.flatnonzero(program.row_kind == Row.COLLECTIVE).tolist():
        place = program.where(int(program.row_where[row]))
        collective = program.collectives[program.row_argument[row]]
        if place[0] == phase and place[1].startswith(path) and collective.group == group:
            found[collective.kind] += 1
    return found


def test_matrices_heads_and_vocabulary_are_shared() -> None:
    setup = setup_of(TENSOR)
    config = setup.model
    shapes = {name: slot.shape for name, slot in build_model(config, setup.tensor).named_parameters()}  # type: ignore[arg-type]
    h, f, v = config.hidden, config.ffn_hidden, config.vocab  # type: ignore[union-attr]
    assert shapes["tok_embeddings.weight"] == shapes["output.weight"] == (v // 2, h)
    assert shapes["layers.0.attention.wq.weight"] == shapes["layers.0.attention.wo.weight"][::-1] == (h // 2, h)
    assert shapes["layers.0.feed_forward.w1.weight"] == (f // 2, h)
    assert shapes["layers.0.attention_norm.weight"] == (h,)


@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_a_layer_gathers_twice_and_scatters_twice_each_way(form: str) -> None:
    program = record(setup_of(TENSOR, FORMS[form], accumulation=1), 1)
    twice = {"all_gather": 2, "reduce_scatter": 2}
    assert meetings(program, Phase.FORWARD, "tp", "layers.3") == twice
    backward = meetings(program, Phase.BACKWARD, "tp", "layers.3")
    assert {kind: backward[kind] for kind in twice} == twice
    assert backward["all_reduce"] == 2  # the norms' gradients, before FSDP reduces them
    assert meetings(program, Phase.LOSS, "tp")["all_reduce"] == 3


def test_with_one_scale_per_tensor_tokens_are_cast_before_they_are_gathered() -> None:
    dtypes = []
    for form in ("compiled", "compiled, rowwise", "compiled, tensorwise"):
        program = record(setup_of(TENSOR, FORMS[form], accumulation=1), 1)
        gathers = [c for c in program.collectives if (c.kind, c.group) == ("all_gather", "tp")]
        dtypes.append({(c.dtype, c.bytes) for c in gathers})
    h = 512
    whole = 2 * 256 * h
    assert dtypes == [
        {("bf16", 2 * whole)},
        {("bf16", 2 * whole)},
        {("bf16", 2 * whole), ("fp8", whole)},
    ]  # the head: 16 bit
    assert meetings(program, Phase.FORWARD, "tp", "layers.3")["all_reduce"] == 2


def test_what_selective_recomputation_keeps_is_not_scattered_again() -> None:
    full, selective = (record(setup_of(TENSOR, FORMS[form], accumulation=1), 1) for form in ("full", "selective"))
    assert meetings(full, Phase.RECOMPUTE, "tp", "layers.3")["reduce_scatter"] == 1
    assert meetings(selective, Phase.RECOMPUTE, "tp", "layers.3")["reduce_scatter"] == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parallel", [TENSOR, BOTH])
def test_stamped_equals_live(parallel: str, form: str) -> None:
    setup = setup_of(parallel, FORMS[form])
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


def test_compiled_blocks_share_sequences_as_eager_ones_do() -> None:
    eager, compiled = (record(setup_of(CONTEXT, FORMS[form], accumulation=1), 1) for form in ("eager", "compiled"))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert meetings(eager, phase, "cp", "layers.3") == meetings(compiled, phase, "cp", "layers.3")
    assert meetings(compiled, Phase.FORWARD, "cp", "layers.3")


def test_stages_hand_on_a_ranks_own_tokens() -> None:
    stages = "{fsdp: {degree: 2}, tensor: {degree: 2, sequence_parallel: true}, pipeline: {degree: 2}}"
    setup = setup_of(stages, accumulation=4)
    program = record(setup, 1)
    h = setup.model.hidden  # type: ignore[union-attr]
    assert {transfer.bytes for transfer in program.transfers} == {2 * 256 // 2 * h * 2}
    assert simulate_setup(setup).time is not None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (", sequence_parallel: true", "", "sequence_parallel: true"),
        ("fsdp: {degree: 4}, ", "", "needs parallel.fsdp"),
        ("layers: 7", "layers: 7, tied_embeddings: true", "torchtitan's parallel.tensor"),
        ("layers: 7", "layers: 7, loss_chunks: 4", "torchtitan's parallel.tensor"),
        ("layers: 7", "layers: 7, lora: {rank: 8}", "torchtitan's parallel.tensor"),
        ("degree: 2,", "degree: 16,", "must divide model.heads"),
        ("parallel:", "compile: {loss: true}\nparallel:", "not with parallel.tensor"),
    ],
)
def test_what_does_not_fit_is_told(old: str, new: str, says: str) -> None:
    text = TEXT.replace("PARALLEL", TENSOR).replace("ACCUMULATION", "1")
    assert old in text
    found = problems(text.replace(old, new, 1))
    assert any(says in message for _, _, message in found), found


@pytest.mark.parametrize("form", ["eager", "full", "compiled"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_share_sequences(schedule: str, form: str) -> None:
    """context_parallel is entered once per step: every stage's rope cache is cut once, whatever the micro-batches; every
    layer of every micro-batch meets the ranks of its sequence; stages hand on a rank's own tokens."""
    stages = f"{{fsdp: {{degree: 2}}, context: {{degree: 2}}, pipeline: {{degree: 2, schedule: {schedule}}}}}"
    setup = setup_of(stages, FORMS[form], accumulation=8)
    whole = setup_of(CONTEXT, FORMS[form], accumulation=1)
    program, alone = record_pipeline(setup, 0, 2), record(whole, 2)
    h = setup.model.hidden  # type: ignore[union-attr]
    assert {transfer.bytes for transfer in program.transfers} == {2 * 256 // 2 * h * 2}
    phases = [Phase.FORWARD, Phase.BACKWARD] + [Phase.RECOMPUTE] * (form == "full")
    for phase in phases:
        once = meetings(alone, phase, "cp", "layers.0")
        assert once
        assert meetings(program, phase, "cp", "layers.0") == Counter({kind: 8 * n for kind, n in once.items()})
    chunks = 2 if schedule == "interleaved" else 1
    assert launches(program, "aten::index_select") == 2 * chunks  # the rope caches of two steps
    assert_equal(program, record_pipeline(setup, 0, 2, stamps=False, folds=False))
    assert simulate_setup(setup).time is not None


def launches(program: Program, name: str) -> int:
    rows = program.row_argument[program.row_kind == Row.LAUNCH]
    return sum(program.kernels[row].name == name for row in rows.tolist())
