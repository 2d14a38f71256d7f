"""Ulysses: ranks that share sequences exchange tokens for heads. What they send, in which order, and what they keep."""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.program.kernels import Attention
from sim.program.program import COMPUTE, CONTEXT, Mem, Phase, Program, Row
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems
from tests.unit.test_context_parallel import all_sent

TEXT = """
model: {preset: llama-tiny, implementation: IMPLEMENTATION, heads: HEADS, kv_heads: KV, head_dim: 64, gqa: GQA}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: MICRO, seq_len: LENGTH}
precision: {parameters: bf16, compute: bf16, reduce: bf16}
parallel: PARALLEL
"""
S, D = 1024, 64


def setup_of(
    parallel: str, implementation: str = "transformers", heads: int = 8, kv: int = 2, gqa: str = "repeat",
    micro: int = 2, length: int = S, more: str = "",
) -> Setup:  # fmt: skip
    text = TEXT.replace("PARALLEL", parallel).replace("IMPLEMENTATION", implementation).replace("HEADS", str(heads))
    text = text.replace("KV", str(kv)).replace("GQA", gqa).replace("MICRO", str(micro)).replace("LENGTH", str(length))
    if implementation == "megatron":
        text = text.replace(f", gqa: {gqa}", "")
    return load_text(text + more, "ulysses").strategies[0]


def zero(n: int, stage: int = 3, more: str = "") -> str:
    return f"{{zero: {{degree: {8 // n}, stage: {stage}{more}}}, context: {{degree: {n}}}}}"


def held_after_forward(program: Program) -> int:
    """Bytes of all tensors at the end of the first forward."""
    end = next(mark.memory_events for mark in program.marks if mark.name == "s0.fwd0")
    size = dict(
        zip(program.mem_handle[program.mem_kind == Mem.ALLOC], program.mem_bytes[program.mem_kind == Mem.ALLOC])
    )
    total = 0
    for kind, handle in zip(program.mem_kind[:end], program.mem_handle[:end]):
        total += {Mem.ALLOC: 1, Mem.FREE: -1}.get(Mem(kind), 0) * int(size[handle])
    return total


def attention_flops(program: Program) -> int:
    rows = program.row_argument[program.row_kind == Row.LAUNCH]
    works = (program.kernels[row].work for row in rows.tolist())
    return sum(work.flops for work in works if isinstance(work, Attention))


@pytest.mark.parametrize("kv", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_queries_keys_values_and_result_are_exchanged_once_each_way(n: int, kv: int) -> None:
    """A rank's share of each; of fewer key heads than ranks every one is repeated first."""
    program = record(setup_of(zero(n), kv=kv), 1)
    of_a_head = 2 * 2 * (S // n) * D
    q, k = 8 * of_a_head, max(kv, n) * of_a_head
    assert all_sent(program, Phase.FORWARD) == [("all_to_all", size, COMPUTE) for size in (q, k, k, q)]
    assert all_sent(program, Phase.BACKWARD) == [("all_to_all", size, COMPUTE) for size in (q, k, k, q)]


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("gqa", "kv"), [("repeat", 8), ("sdpa", 8), ("sdpa", 4), ("sdpa", 2), ("sdpa", 1)])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_rank_keeps_what_its_own_tokens_make_it_keep_and_the_result_twice(
    n: int, gqa: str, kv: int, micro: int
) -> None:
    """All tokens of some heads are as many bytes as some tokens of all heads, but for repeated key heads. The result is
    kept for attention's backward, and once more, exchanged, for the product that reads it."""
    shared = record(setup_of(zero(n), kv=kv, gqa=gqa, micro=micro), 1)
    alone = record(setup_of("{zero: {degree: 8, stage: 3}}", kv=kv, gqa=gqa, micro=micro, length=S // n), 1)
    layers, of_a_head = 4, 2 * micro * (S // n) * D
    repeated = 2 * (max(n, kv) - kv)
    assert held_after_forward(shared) - held_after_forward(alone) == layers * (8 + repeated) * of_a_head


@pytest.mark.parametrize("implementation", ["transformers", "megatron"])
def test_all_ranks_together_do_the_attention_of_the_whole_sequence(implementation: str) -> None:
    data = "{data: {degree: 8}}" if implementation == "megatron" else "{zero: {degree: 8, stage: 3}}"
    shared = "{data: {degree: 2}, context: {degree: 4, kind: ulysses}}" if implementation == "megatron" else zero(4)
    whole, part = (record(setup_of(given, implementation, kv=4), 1) for given in (data, shared))
    assert 4 * attention_flops(part) == attention_flops(whole)


@pytest.mark.parametrize("n", [2, 4])
def test_transformer_engine_sends_on_a_stream_of_its_own_and_compute_waits(n: int) -> None:
    parallel = f"{{context: {{degree: {n}, kind: ulysses}}, data: {{degree: {8 // n}}}}}"
    setup = setup_of(parallel, "megatron", kv=4)
    program = record(setup, 1)
    of_a_head = 2 * 2 * (S // n) * D
    forward = [("all_to_all", heads * of_a_head, CONTEXT) for heads in (8, 4, 4, 8)]
    assert all_sent(program, Phase.FORWARD) == forward
    assert all_sent(program, Phase.BACKWARD) == [forward[-1], *forward[:-1]]
    outcome = simulate_setup(setup)
    assert outcome.lanes is not None
    played, lanes = outcome.program, outcome.lanes
    exchanged = np.flatnonzero((played.row_kind == Row.COLLECTIVE) & (played.row_stream == CONTEXT))[:3]
    kernels = np.flatnonzero(played.row_kind == Row.LAUNCH)
    first = next(r for r in kernels.tolist() if isinstance(played.kernels[played.row_argument[r]].work, Attention))
    assert max(lanes.end_ns[exchanged]) <= lanes.start_ns[first]


@pytest.mark.parametrize("n", [2, 4])
def test_transformer_engine_keeps_the_result_twice_too(n: int) -> None:
    parallel = f"{{context: {{degree: {n}, kind: ulysses}}, data: {{degree: {8 // n}}}}}"
    shared = record(setup_of(parallel, "megatron", kv=4), 1)
    alone = record(setup_of("{data: {degree: 8}}", "megatron", kv=4, length=S // n), 1)
    assert held_after_forward(shared) - held_after_forward(alone) == 4 * 2 * 2 * (S // n) * 8 * D


def test_states_are_shared_by_all_ranks_and_sequences_by_some() -> None:
    setup = setup_of(zero(4))
    assert setup.mesh.dimensions == (("dp", 2), ("cp", 4))
    assert setup.zero is not None
    assert (setup.zero.degree, setup.data_parallel, setup.local_tokens, setup.data) == (8, 2, 256, None)
    program = record(setup, 1)
    assert {c.size for c in program.collectives if c.group == "dp"} == {8}
    assert {c.size for c in program.collectives if c.group == "cp"} == {4}


@pytest.mark.parametrize("parallel", [zero(4, 1), zero(4, 2), "{fsdp: {degree: 2}, context: {degree: 4}}"])
def test_any_sharding_that_reduces_over_its_ranks_will_do(parallel: str) -> None:
    outcome = simulate_setup(setup_of(parallel))
    assert outcome.time is not None
    assert outcome.utilization is not None
    per_gpu = 2 * 2 * S / 8 / (outcome.time.step_ns * 1e-9)
    assert outcome.utilization.tokens_per_s_per_gpu == pytest.approx(per_gpu)


@pytest.mark.parametrize("more", ["", "checkpoint: {every: 1}\n", "checkpoint: {every: 1, reentrant: true}\n"])
def test_stamped_equals_live(more: str) -> None:
    setup = setup_of("{fsdp: {degree: 2}, context: {degree: 4}}", more=f"{more}optimizer: {{clip_norm: 1.0}}\n")
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


def test_a_recomputed_layer_exchanges_its_tokens_again() -> None:
    program = record(setup_of(zero(4), more="checkpoint: {every: 1}\n"), 1)
    assert all_sent(program, Phase.RECOMPUTE) == all_sent(program, Phase.FORWARD)


@pytest.mark.parametrize(
    ("parallel", "changes", "path", "says"),
    [
        (zero(8), {"heads": 12}, "parallel.context.degree", "8 ranks cannot share 12 heads"),
        (zero(4), {"heads": 12, "kv": 3}, "parallel.context.degree", "4 ranks cannot share 3 key heads"),
        (
            "{context: {degree: 8, kind: ulysses}}", {"implementation": "megatron"}, "parallel.context.degree",
            "8 ranks cannot share 2 key heads",
        ),
        (
            "{context: {degree: 4, kind: ulysses}, tensor: {degree: 2}}", {"implementation": "megatron"},
            "parallel.context.degree", "4 ranks cannot share 1 key head",
        ),
        ("{context: {degree: 8}}", {}, "parallel.context", "needs parallel.zero or fsdp"),
        (zero(4).replace("degree: 4}", "degree: 4, kind: ring}"), {}, "parallel.context.kind", "ulysses"),
        (
            "{fsdp: {degree: 2}, context: {degree: 4, kind: ulysses}}", {"implementation": "torchtitan"},
            "parallel.context.kind", "all-gather, ring",
        ),
        (zero(8), {"length": 1020}, "parallel.context.degree", "does not split into 8 equal parts"),
        (zero(8, more=", overlap_comm: 3"), {}, "parallel.zero.overlap_comm", ""),
        ("{ddp: {degree: 2}, context: {degree: 4}}", {}, "parallel.ddp", "is modelled alone"),
    ],
)  # fmt: skip
def test_a_sharing_that_cannot_be_is_a_problem(parallel: str, changes: dict[str, object], path: str, says: str) -> None:
    names = {"implementation": "transformers", "heads": 8, "kv": 2, "length": S} | changes
    text = TEXT.replace("PARALLEL", parallel).replace("GQA", "sdpa").replace("MICRO", "1")
    for name, value in zip(("IMPLEMENTATION", "HEADS", "KV", "LENGTH"), names.values()):
        text = text.replace(name, str(value))
    if names["implementation"] == "megatron":
        text = text.replace(", gqa: sdpa", "")
    found = problems(text)
    assert any(where == path and says in message for _, where, message in found), found
