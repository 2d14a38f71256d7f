"""Any pipeline of any chain comes to its end, computes everything once, and holds what its schedule says."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.api import simulate
from sim.runtime.schedules import SCHEDULES, in_flight, order
from sim.scenario import load_text
from sim.scenario.pipeline import FIXED_CHUNKS

EXAMPLES = int(os.environ.get("SIM_EXAMPLES", "60"))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, list[int]]:
    """Schedule, ranks, micro-batches, stages per rank, layers of every stage."""
    schedule = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 5))
    chunks = FIXED_CHUNKS.get(schedule) or draw(st.integers(1, 3))
    rounds = draw(st.integers(2 if schedule == "dualpipe-v" else 1, 4))
    odd = draw(st.integers(0, 3)) if schedule in ("gpipe", "1f1b", "breadth-first", "zb-v", "dualpipe-v") else 0
    layers = draw(st.lists(st.integers(1, 3), min_size=ranks * chunks, max_size=ranks * chunks))
    return schedule, ranks, rounds * ranks + odd, chunks, layers


@settings(max_examples=EXAMPLES, deadline=None)
@given(pipelines(), st.data())
def test_any_pipeline(pipeline: tuple[str, int, int, int, list[int]], data: st.DataObject) -> None:
    schedule, ranks, micro_batches, chunks, placement = pipeline
    count = sum(placement)
    times = st.lists(st.integers(1, 50), min_size=count, max_size=count)
    forward, backward = data.draw(times), data.draw(times)
    text = f"""
model: {{chain: {{layers: {count}, entry: 0 B, activation: 1 MiB,
                 forward: [{", ".join(f"{t} us" for t in forward)}],
                 backward: [{", ".join(f"{t} us" for t in backward)}]}}}}
cluster: {{gpu: h100, gpus_per_node: {ranks}}}
batch: {{micro_batch: 1, seq_len: 1, accumulation: {micro_batches}}}
parallel: {{pipeline: {{degree: {ranks}, schedule: {schedule}, virtual: {chunks}, placement: {placement}}}}}
"""
    outcome = simulate(load_text(text, "any")).outcomes[0]
    assert outcome.time is not None and outcome.bubble_fraction is not None
    begins = [sum(placement[:stage]) for stage in range(len(placement) + 1)]
    work_ns = []
    for rank, played in enumerate(outcome.ranks):
        own = [layer for stage in played.stages for layer in range(begins[stage], begins[stage + 1])]
        work_ns.append(1000 * micro_batches * sum(forward[layer] + backward[layer] for layer in own))
        actions = order(schedule, rank, ranks, micro_batches, chunks)
        assert played.in_flight == in_flight(actions, until_weights=True)
        most = max(placement[stage] for stage in played.stages)
        assert played.steady.allocated_bytes <= played.in_flight * most << 20
    assert outcome.time.step_ns >= max(work_ns)
    idle = ranks * outcome.time.step_ns - sum(work_ns)
    assert outcome.bubble_fraction == idle / sum(work_ns)
