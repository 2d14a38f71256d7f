"""Ranks that share sequences: what they exchange and when, who reduces gradients with whom, what may be asked for."""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.hardware.mesh import Span
from sim.program.kernels import Attention
from sim.program.program import COMPUTE, CONTEXT, Phase, Program, Row
from sim.runtime.groups import placement
from sim.runtime.record import record
from sim.runtime.train_pipeline import record_pipeline
from sim.scenario import ScenarioError, load_text
from sim.scenario.parallel import DataParallel
from sim.scenario.setup import Setup

TEXT = """
model: {preset: PRESET, implementation: megatron}
cluster: {gpu: h100, gpus_per_node: 8, nodes: NODES}
batch: {micro_batch: 2, seq_len: 1024}
precision: {parameters: bf16, compute: bf16}
parallel: PARALLEL
"""
HEADS, KV_HEADS, D = 8, 2, 64  # llama-tiny


def setup_of(parallel: str, preset: str = "llama-tiny", nodes: int = 1, more: str = "") -> Setup:
    text = TEXT.replace("PRESET", preset).replace("NODES", str(nodes)).replace("PARALLEL", parallel)
    return load_text(text + more, "cp").strategies[0]


def rows_of(program: Program, phase: Phase, path: str) -> list[int]:
    return [row for row, w in enumerate(program.row_where.tolist()) if program.where(w)[:2] == (phase, path)]


def sent(program: Program, phase: Phase, layer: int) -> list[tuple[str, int, int]]:
    """(kind, bytes, stream) of what a layer's attention exchanges over the context-parallel group."""
    found = []
    for row in rows_of(program, phase, f"layers.{layer}.self_attention.core_attention"):
        if program.row_kind[row] == Row.COLLECTIVE:
            collective = program.collectives[program.row_argument[row]]
            assert collective.group == "cp"
            found.append((collective.kind, collective.bytes, int(program.row_stream[row])))
    return found


def attentions(program: Program, phase: Phase, layer: int) -> list[Attention]:
    rows = rows_of(program, phase, f"layers.{layer}.self_attention.core_attention")
    works = [program.kernels[program.row_argument[r]].work for r in rows if program.row_kind[r] == Row.LAUNCH]
    return [work for work in works if isinstance(work, Attention)]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ring_sends_keys_and_values_n_minus_1_times_and_in_backward_their_gradients_as_often(n: int) -> None:
    program = record(setup_of(f"{{context: {{degree: {n}}}, data: {{degree: {8 // n}}}}}"), steps=1)
    keys_and_values = 2 * 2 * (1024 // n) * 2 * KV_HEADS * D
    assert sent(program, Phase.FORWARD, 1) == [("ring_exchange", keys_and_values, CONTEXT)] * (n - 1)
    back = sent(program, Phase.BACKWARD, 1)
    both = [2 * keys_and_values] * (n - 2)
    assert [size for _, size, _ in back] == [keys_and_values, *both, keys_and_values]
    assert sum(size for _, size, _ in back) == 2 * (n - 1) * keys_and_values


@pytest.mark.parametrize("kind", ["ring", "all-gather"])
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_all_ranks_together_do_the_attention_of_the_whole_sequence(phase: Phase, kind: str) -> None:
    """The load is balanced: each rank does its n-th of it (with the diagonal of its own blocks counted as a half)."""
    n = 4
    whole = attentions(record(setup_of("{data: {degree: 8}}"), steps=1), phase, 1)
    parts = attentions(
        record(setup_of(f"{{context: {{degree: {n}, kind: {kind}}}, data: {{degree: 2}}}}"), 1), phase, 1
    )
    assert sum(work.flops for work in parts) == sum(work.flops for work in whole) // n


@pytest.mark.parametrize("n", [2, 4])
def test_an_all_gather_gathers_keys_and_values_and_scatters_their_gradients(n: int) -> None:
    parallel = f"{{context: {{degree: {n}, kind: all-gather}}, data: {{degree: {8 // n}}}}}"
    program = record(setup_of(parallel), steps=1)
    whole = 2 * 1024 * 2 * KV_HEADS * D
    assert sent(program, Phase.FORWARD, 1) == [("all_gather", whole, COMPUTE)] * 2
    back = [("all_gather", whole, COMPUTE)] * 2 + [("reduce_scatter", whole, COMPUTE)] * 2
    assert sent(program, Phase.BACKWARD, 1) == back


def test_an_exchange_goes_on_beside_the_attention_of_the_step_before() -> None:
    setup = setup_of("{context: {degree: 4}, data: {degree: 2}}")
    outcome = simulate_setup(setup)
    assert outcome.lanes is not None
    lanes, program = outcome.lanes, outcome.program
    ring = np.flatnonzero((program.row_kind == Row.COLLECTIVE) & (program.row_stream == CONTEXT))
    kernels = np.flatnonzero((program.row_kind == Row.LAUNCH) & (program.row_stream == COMPUTE))
    works = [program.kernels[program.row_argument[row]].work for row in kernels.tolist()]
    attention = kernels[[isinstance(work, Attention) for work in works]]
    start, end = lanes.start_ns, lanes.end_ns
    first = ring[0]
    after = attention[attention > first][0]
    assert start[first] < end[after]
    assert start[after] < end[first] or end[first] <= start[after] + 1  # neither waits for the other
    following = attention[attention > first][1]
    assert start[following] >= end[first]


def test_context_ranks_lie_around_tensor_ranks_and_share_sequences() -> None:
    setup = setup_of("{context: {degree: 2}, tensor: {degree: 2}, data: {degree: 2}}")
    assert setup.mesh.dimensions == (("dp", 2), ("cp", 2), ("tp", 2))
    assert (setup.data_parallel, setup.local_tokens) == (2, 512)
    assert setup.data == DataParallel(degree=4)
    assert setup_of("{context: {degree: 8}}").data == DataParallel(degree=8)


def test_gradients_are_reduced_over_data_and_context_ranks_together() -> None:
    parallel = "{context: {degree: 2}, tensor: {degree: 2}, data: {degree: 4, distributed_optimizer: true}}"
    setup = setup_of(parallel, nodes=2)
    program = record(setup, steps=1)
    (reduced,) = [c for c in program.collectives if c.kind == "reduce_scatter" and c.group == "dp"]
    assert reduced.size == 8
    assert placement(setup.mesh, reduced) == Span(8, 2, 4)
    (ring,) = {c.size: c for c in program.collectives if c.group == "cp"}.values()
    assert placement(setup.mesh, ring) == Span(2, 1, 2)


def test_fsdp_shards_over_data_and_context_ranks() -> None:
    setup = setup_of("{context: {degree: 4}, fsdp: {degree: 2}}")
    assert setup.mesh.dimensions == (("fsdp", 2), ("cp", 4))
    assert setup.fsdp is not None
    assert setup.fsdp.degree == 8
    assert setup.data_parallel == 2
    gathered = {c.size for c in record(setup, steps=1).collectives if c.group == "fsdp"}
    assert gathered == {8}


def test_pipeline_stages_hand_on_the_tokens_of_a_rank() -> None:
    setup = setup_of("{context: {degree: 2}, tensor: {degree: 2, sequence_parallel: true}, pipeline: {degree: 2}}")
    sizes = {transfer.bytes for transfer in record_pipeline(setup, 0, 1).transfers}
    assert sizes == {2 * 2 * 512 * 1024 // 2 // 2}


def test_throughput_counts_a_sequence_once() -> None:
    time = simulate_setup(setup_of("{context: {degree: 8}}"))
    assert time.time is not None
    assert time.utilization is not None
    per_gpu = 2 * 1024 / 8 / (time.time.step_ns * 1e-9)
    assert time.utilization.tokens_per_s_per_gpu == pytest.approx(per_gpu)


def test_gpt_with_transformer_engines_attention_shares_sequences_too() -> None:
    text = TEXT.replace("PRESET", "gpt-tiny, attention: sdpa, max_positions: 1024").replace("NODES", "1")
    setup = load_text(text.replace("PARALLEL", "{context: {degree: 8}}"), "cp").strategies[0]
    program = record(setup, steps=1)
    assert len(sent(program, Phase.FORWARD, 1)) == 7


@pytest.mark.parametrize(
    ("parallel", "old", "new", "path", "text"),
    [
        (
            "{context: {degree: 8}}", "PRESET, implementation: megatron", "gpt-tiny, implementation: nanogpt",
            "parallel.context", "megatron, torchtitan, transformers only",
        ),
        ("{context: {degree: 8}}", "megatron", "torchtitan", "parallel.context", "needs parallel.fsdp"),
        (
            "{context: {degree: 8}, fsdp: {degree: 1}}", "megatron}", "torchtitan}\nprecision: {compute: fp32}",
            "parallel.context", "is written for flash attention",
        ),
        ("{context: {degree: 8}}", "1024", "1000", "parallel.context.degree", "does not split into 2 x 8 equal parts"),
        (
            "{context: {degree: 2}, tensor: {degree: 4, sequence_parallel: true}}", "1024", "1028",
            "parallel.context.degree", "leaves 514 tokens of a sequence, which 4 tensor ranks cannot share",
        ),
        ("{context: {degree: 8}}", "PRESET", "gpt-tiny", "parallel.context", "a fused kernel, not unfused"),
        ("{context: {degree: 8, kind: rings}}", "", "", "parallel.context.kind", "rings"),
        ("{context: {degree: 4}}", "", "", "parallel", "cp 4 = 4 ranks, but the cluster has 8 GPUs"),
    ],
)  # fmt: skip
def test_a_sharing_that_cannot_be_is_a_problem(parallel: str, old: str, new: str, path: str, text: str) -> None:
    scenario = TEXT.replace(old, new, 1) if old else TEXT
    if "precision" in new:
        scenario = scenario.replace("precision: {parameters: bf16, compute: bf16}\n", "")
    scenario = scenario.replace("PARALLEL", parallel).replace("PRESET", "llama-tiny").replace("NODES", "1")
    with pytest.raises(ScenarioError) as caught:
        load_text(scenario, "cp")
    assert any(p.path == path and text in p.text for p in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("kind", ["ring", "all-gather"])
@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_experts_and_latent_attention_share_sequences_too(preset: str, kind: str) -> None:
    """Expert groups go over the ranks of a sequence as over any others."""
    parallel = f"{{context: {{degree: 4, kind: {kind}}}, expert: {{degree: 4}}, data: {{degree: 2}}}}"
    setup = setup_of(parallel, f"{preset}, layers: 2")
    assert setup.mesh.degree("edp") == 2
    program = record(setup, steps=1)
    assert len(attentions(program, Phase.FORWARD, 1)) == (4 if kind == "ring" else 2)


@pytest.mark.parametrize("kind", [None, "all-gather", "ring"])
def test_torchtitans_attention_gathers_or_passes_on_beside_its_first_step(kind: str | None) -> None:
    """torch's default gathers once, asynchronously; gradients of keys and values go round in fp32 either way."""
    n, how = 4, f", kind: {kind}" if kind else ""
    text = TEXT.replace("PRESET", "llama-tiny, gqa: sdpa").replace("NODES", "1").replace("megatron", "torchtitan")
    text = text.replace("parameters: bf16", "parameters: fp32")
    parallel = f"{{context: {{degree: {n}{how}}}, fsdp: {{degree: 2}}}}"
    setup = load_text(text.replace("PARALLEL", parallel), "cp").strategies[0]
    assert setup.fsdp is not None
    assert (setup.fsdp.degree, setup.data_parallel) == (8, 2)
    program = record(setup, steps=1)
    assert all(stream == CONTEXT for _, _, stream in all_sent(program, Phase.FORWARD, 1))
    keys_and_values = 2 * 2 * (1024 // n) * 2 * KV_HEADS * D
    forward = (
        [("ring_exchange", keys_and_values)] * (n - 1) if kind == "ring" else [("all_gather", n * keys_and_values)]
    )
    assert [what[:2] for what in all_sent(program, Phase.FORWARD, 1)] == forward
    back = [what[:2] for what in all_sent(program, Phase.BACKWARD, 1)]
    assert back.count(("ring_exchange", 2 * keys_and_values)) == n
    assert len(back) == n + len(forward)


def all_sent(program: Program, phase: Phase, layer: int = 1) -> list[tuple[str, int, int]]:
    """(kind, bytes, stream) of what a layer exchanges over the context-parallel group, in order."""
    found = []
    for row in np.flatnonzero(program.row_kind == Row.COLLECTIVE).tolist():
        place, collective = program.where(int(program.row_where[row])), program.collectives[program.row_argument[row]]
        if place[0] == phase and place[1].startswith(f"layers.{layer}.") and collective.group == "cp":
            found.append((collective.kind, collective.bytes, int(program.row_stream[row])))
    return found
