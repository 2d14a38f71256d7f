"""Megatron's tensor, sequence and data parallelism: who holds what, who meets when, and what a scenario may ask for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.model.build import build_model
from sim.model.catalogue import build_model as config_of
from sim.model.catalogue import preset_shapes
from sim.model.shard.tensor import TensorParallel
from sim.program.program import COMPUTE, DATA, TENSOR, Owner, Phase, Program, Row
from sim.report.parameter_bytes import bytes_per_parameter
from sim.runtime.groups import placement
from sim.runtime.record import record
from sim.scenario import ScenarioError, load_text
from sim.scenario.parallel import DataParallel
from sim.scenario.setup import Setup

TEXT = """
model: {preset: gpt-tiny, implementation: megatron}
cluster: {gpu: a100, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 128}
precision: {parameters: bf16, compute: bf16}
parallel: PARALLEL
"""
LAYERS = 4
INSTANCES = "parallel.data.optimizer_instances"
TP8 = "{tensor: {degree: 8}}"
SP8 = "{tensor: {degree: 8, sequence_parallel: true}}"


def setup_of(parallel: str, more: str = "") -> Setup:
    return load_text(TEXT.replace("PARALLEL", parallel) + more, "tp").strategies[0]


def meetings(program: Program, phase: Phase, path: str) -> list[tuple[str, int]]:
    """(kind, stream) of the collectives of a phase under a path, in order."""
    rows = np.flatnonzero(program.row_kind == Row.COLLECTIVE).tolist()
    found = []
    for row in rows:
        place = program.where(int(program.row_where[row]))
        if place[0] == phase and place[1].startswith(path):
            collective = program.collectives[program.row_argument[row]]
            found.append((collective.kind, int(program.row_stream[row])))
    return found


def kernels_of(program: Program) -> Counter[str]:
    return Counter(program.kernels[n].name for n in program.row_argument[program.row_kind == Row.LAUNCH].tolist())


def test_a_variant_of_the_optimizer_is_told_to_have_no_effect() -> None:
    text = TEXT.replace("PARALLEL", TP8) + "optimizer: {variant: for-loop}\n"
    assert any("no effect" in warning for warning in load_text(text, "tp").warnings)
    assert not load_text(TEXT.replace("PARALLEL", TP8), "tp").warnings


# Who holds what


def test_matrices_are_split_by_columns_then_rows_and_what_follows_a_sum_is_whole() -> None:
    config = config_of("gpt-tiny", preset_shapes("gpt-tiny"), "megatron")
    shapes = {name: slot.shape for name, slot in build_model(config, TensorParallel(8)).named_parameters()}
    h, f, v = config.hidden, config.ffn_hidden, config.vocab
    layer = {name.removeprefix("layers.0."): shape for name, shape in shapes.items() if name.startswith("layers.0.")}
    assert layer == {
        "input_layernorm.weight": (h,),
        "input_layernorm.bias": (h,),
        "self_attention.linear_proj.weight": (h, h // 8),
        "self_attention.linear_proj.bias": (h,),
        "self_attention.linear_qkv.weight": (3 * h // 8, h),
        "self_attention.linear_qkv.bias": (3 * h // 8,),
        "pre_mlp_layernorm.weight": (h,),
        "pre_mlp_layernorm.bias": (h,),
        "mlp.linear_fc1.weight": (f // 8, h),
        "mlp.linear_fc1.bias": (f // 8,),
        "mlp.linear_fc2.weight": (h, f // 8),
        "mlp.linear_fc2.bias": (h,),
    }
    assert shapes["embedding.word_embeddings.weight"] == (v // 8, h)


def test_tensor_ranks_are_neighbours_and_share_one_ranks_tokens() -> None:
    setup = setup_of("{tensor: {degree: 4}, data: {degree: 2}}")
    assert setup.mesh.dimensions == (("dp", 2), ("tp", 4))
    assert setup.data_parallel == 2
    with_fsdp = setup_of("{tensor: {degree: 2}, fsdp: {degree: 2, replicas: 2}}")
    assert with_fsdp.mesh.dimensions == (("replicate", 2), ("fsdp", 2), ("tp", 2))
    assert with_fsdp.data is None
    assert setup_of(TP8).data == DataParallel()


# Who meets when


def test_a_layer_sums_twice_forward_and_twice_beside_backward() -> None:
    program = record(setup_of(TP8), steps=1)
    assert meetings(program, Phase.FORWARD, "layers.1") == [("all_reduce", COMPUTE)] * 2
    assert meetings(program, Phase.BACKWARD, "layers.1") == [("all_reduce", TENSOR)] * 2


def test_without_overlap_a_column_parallel_layer_sums_after_both_products() -> None:
    program = record(setup_of("{tensor: {degree: 8, async_all_reduce: false}}"), steps=1)
    assert meetings(program, Phase.FORWARD, "layers.1") == [("all_reduce", COMPUTE)] * 2
    assert meetings(program, Phase.BACKWARD, "layers.1") == [("all_reduce", COMPUTE)] * 2
    beside = record(setup_of(TP8), steps=1)
    assert kernels_of(program) == kernels_of(beside)


def test_overlap_of_sums_that_are_none_is_noted() -> None:
    for parallel, why in (
        ("{tensor: {degree: 8, sequence_parallel: true, async_all_reduce: false}}", "sequence parallelism reduces"),
        ("{tensor: {degree: 1, async_all_reduce: false}, data: {degree: 8}}", "one rank sums nothing"),
    ):
        (warning,) = load_text(TEXT.replace("PARALLEL", parallel)).warnings
        assert f"has no effect: {why}" in warning


def test_with_sequence_parallelism_sums_become_scatters_and_gathers() -> None:
    program = record(setup_of(SP8), steps=1)
    gather, scatter = "all_gather", "reduce_scatter"
    assert meetings(program, Phase.FORWARD, "layers.1") == [(gather, COMPUTE), (scatter, COMPUTE)] * 2
    half = [(gather, COMPUTE), (gather, TENSOR), (scatter, TENSOR)]  # row-parallel, then column-parallel
    assert meetings(program, Phase.BACKWARD, "layers.1") == half * 2


def test_full_recomputation_repeats_the_forward_meetings_and_core_attention_none() -> None:
    full = record(setup_of(TP8, "checkpoint: {reentrant: true}\n"), steps=1)
    assert meetings(full, Phase.RECOMPUTE, "layers.1") == [("all_reduce", COMPUTE)] * 2
    selective = record(setup_of(TP8, "checkpoint: {inside: core_attention, reentrant: true}\n"), steps=1)
    assert meetings(selective, Phase.RECOMPUTE, "layers.1") == []
    mlp = record(setup_of(TP8, "checkpoint: {inside: mlp, reentrant: true}\n"), steps=1)
    assert meetings(mlp, Phase.RECOMPUTE, "layers.1") == [("all_reduce", COMPUTE)]


def test_the_vocabulary_is_summed_once_in_the_embedding_and_three_times_in_the_loss() -> None:
    program = record(setup_of(TP8), steps=1)
    assert meetings(program, Phase.FORWARD, "embedding") == [("all_reduce", COMPUTE)]
    assert meetings(program, Phase.LOSS, "") == [("all_reduce", COMPUTE)] * 3


def test_sequence_parallel_ranks_sum_the_gradients_of_norms_and_whole_biases_once_per_step() -> None:
    setup = setup_of(SP8)
    program = record(setup, steps=1)
    h = 512
    whole = LAYERS * (4 * h + 2 * h) + 2 * h
    (summed,) = [
        c for c in program.collectives if c.kind == "all_reduce" and c.dtype == "fp32" and c.bytes == 4 * whole
    ]
    assert (summed.group, summed.size) == ("tp", 8)
    assert not any(c.bytes == 4 * whole for c in record(setup_of(TP8), steps=1).collectives)


@pytest.mark.parametrize(("distributed", "kind"), [("false", "all_reduce"), ("true", "reduce_scatter")])
def test_gradients_are_reduced_once_per_step_whatever_the_micro_batches(distributed: str, kind: str) -> None:
    text = f"{{data: {{degree: 8, distributed_optimizer: {distributed}}}}}"
    program = record(_accumulating(text), steps=2)
    rows = program.row_argument[(program.row_kind == Row.COLLECTIVE) & (program.row_stream == DATA)]
    assert [program.collectives[i].kind for i in rows.tolist()] == [kind] * 2


def test_moments_in_bf16_are_half_as_large() -> None:
    """Adam reads and writes 20 bytes per parameter in place of 28; a rank of 8 holds 4 / 8 bytes less."""
    text = "{data: {degree: 8, distributed_optimizer: true, moments: bf16}}"
    halved, whole = setup_of(text), setup_of(text.replace(", moments: bf16", ""))
    assert sum(bytes_per_parameter(whole).values()) - sum(bytes_per_parameter(halved).values()) == 4 / 8
    programs = [record(setup, steps=1) for setup in (whole, halved)]
    adam = [next(k.work.bytes for k in p.kernels if k.name == "multi_tensor_adam") for p in programs]
    assert adam[0] * 20 == adam[1] * 28


def test_instances_of_the_optimizer_scatter_inside_and_sum_across() -> None:
    """8 replicas of 16-bit parameters, 2 instances on nodes of 4: 4 ranks scatter and gather, pairs across nodes sum a quarter;
    states are those of 4 shards."""
    text = "{data: {degree: 8, distributed_optimizer: true, optimizer_instances: 2}}"
    setup = load_text(TEXT.replace("PARALLEL", text).replace("gpus_per_node: 8", "gpus_per_node: 4, nodes: 2"), "dp")
    program = record(setup.strategies[0], steps=1)
    found = [c for c in program.collectives if c.group != "tp" and c.bytes > 4]
    scattered, summed, gathered = (
        next(c for c in found if c.kind == k) for k in ("reduce_scatter", "all_reduce", "all_gather")
    )
    assert [(c.group, c.size) for c in (scattered, summed, gathered)] == [
        ("dp:shard", 4),
        ("dp:across", 2),
        ("dp:shard", 4),
    ]
    assert (summed.bytes, gathered.bytes) == (scattered.bytes // 4, scattered.bytes // 2)
    mesh = setup.strategies[0].mesh
    assert [placement(mesh, c).nodes for c in (scattered, summed)] == [1, 2]
    states = _bytes_of(program, Owner.OPTIMIZER)
    assert states == 12 * scattered.bytes // 4 // 4


def _bytes_of(program: Program, owner: Owner) -> int:
    made = program.mem_kind == 0
    return int(program.mem_bytes[made][program.owners == owner].sum())


def _accumulating(parallel: str) -> Setup:
    text = TEXT.replace("PARALLEL", parallel).replace("seq_len: 128", "seq_len: 128, accumulation: 3")
    return load_text(text, "tp").strategies[0]


def test_overlapped_gradients_are_reduced_in_the_last_backward_only() -> None:
    parallel = "{data: {degree: 8, overlap: true}}"
    text = TEXT.replace("PARALLEL", parallel).replace("seq_len: 128", "seq_len: 128, accumulation: 3")
    text = text.replace("implementation: megatron", "implementation: megatron, hidden: 2048, ffn_hidden: 8192")
    program = record(load_text(text, "tp").strategies[0], steps=1)
    rows = np.flatnonzero((program.row_kind == Row.COLLECTIVE) & (program.row_stream == DATA))
    marks = {mark.name: mark.rows for mark in program.marks}
    assert len(rows) > 2
    assert (rows > marks["s0.fwd2"]).all()
    assert (rows[:-1] < marks["s0.bwd2"]).all()
    sizes = [program.collectives[i].bytes for i in program.row_argument[rows].tolist()]
    assert sum(sizes) == 4 * sum(int(b) for b in _parameter_elements(program))


def _parameter_elements(program: Program) -> list[int]:
    made = program.mem_kind == 0
    return (program.mem_bytes[made][program.owners == Owner.PARAMETER] // 2).tolist()


def test_a_collective_on_the_compute_stream_is_exposed_and_one_beside_products_is_not() -> None:
    outcome = simulate_setup(setup_of(TP8))
    assert outcome.lanes is not None
    assert outcome.time is not None
    lanes = outcome.lanes
    ends = [mark.rows for mark in outcome.program.marks if mark.name.endswith(".end")]
    last = lanes.in_step(ends[-2], ends[-1])
    blocking = last & lanes.is_collective & (outcome.program.row_stream == COMPUTE)
    assert outcome.time.exposed_communication_ns >= lanes.busy_ns(blocking) > 0
    assert Counter(outcome.time.collectives) == Counter({"all_reduce": 4 * LAYERS + 1 + 3 + 1 + 1})  # head, norm


# What a scenario may ask for


@pytest.mark.parametrize(
    ("parallel", "old", "new", "path", "text"),
    [
        (TP8, "gpt-tiny,", "gpt-tiny, heads: 4,", "parallel.tensor.degree", "must divide model.heads (4)"),
        (TP8, "gpt-tiny,", "llama-3.1-8b, kv_heads: 4,", "parallel.tensor.degree", "must divide model.kv_heads (4)"),
        (TP8, "gpt-tiny,", "gpt-tiny, vocab: 8190,", "parallel.tensor.degree", "must divide model.vocab (8190)"),
        (SP8, "seq_len: 128", "seq_len: 100", "parallel.tensor.sequence_parallel", "a degree that divides"),
        (TP8, "megatron", "nanogpt", "parallel.tensor", "only implementations megatron"),
        ("{data: {degree: 8}}", "megatron", "nanogpt", "parallel.data", "only implementation megatron"),
        ("{data: {degree: 2}, fsdp: {degree: 4}}", "", "", "parallel.data", "fsdp is data parallelism already"),
        ("{data: {degree: 8, optimizer_instances: 2}}", "", "", INSTANCES, "needs distributed_optimizer: true"),
        (
            "{data: {degree: 8, distributed_optimizer: true, optimizer_instances: 3}}",
            "",
            "",
            INSTANCES,
            "divide the replicas",
        ),
        ("{data: {degree: 8, moments: bf16}}", "", "", "parallel.data.moments", "needs distributed_optimizer: true"),
        ("{tensor: {degree: 4}}", "", "", "parallel", "tp 4 = 4 ranks, but the cluster has 8 GPUs"),
    ],
)
def test_a_split_that_cannot_be_is_a_problem(parallel: str, old: str, new: str, path: str, text: str) -> None:
    scenario = TEXT.replace("PARALLEL", parallel)
    with pytest.raises(ScenarioError) as caught:
        load_text(scenario.replace(old, new, 1) if old else scenario, "tp")
    assert any(p.path == path and text in p.text for p in caught.value.problems), caught.value.problems


def test_under_fsdp2_gradients_of_some_tokens_are_summed_over_the_tensor_ranks() -> None:
    """Norms, and biases behind row-parallel layers: gathered over FSDP's ranks, summed at once, sharded again."""
    both = "{tensor: {degree: 2, sequence_parallel: true}, fsdp: {degree: 4}}"
    setup = setup_of(both, "optimizer: {clip_norm: null}\n")
    slots = build_model(setup.model, setup.tensor).parameters()  # type: ignore[arg-type]
    partial = [slot for slot in slots if slot.partial]
    program = record(setup, steps=1)
    used = [program.collectives[n] for n in program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()]
    total, sharded = used[-1 - len(partial)], used[-len(partial) :]
    assert (total.kind, total.group, total.bytes) == ("all_reduce", "tp", 2 * sum(slot.elements for slot in partial))
    assert [c.kind for c in sharded] == ["broadcast"] * len(partial)
    alone = record(setup_of("{tensor: {degree: 2}, fsdp: {degree: 4}}", "optimizer: {clip_norm: null}\n"), steps=1)
    assert "broadcast" not in {c.kind for c in alone.collectives}
