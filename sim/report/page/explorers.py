"""Simulations behind the page's sliders: python -m sim.report.page.explorers writes explorers.json.

Every point is a scenario that was simulated; tests play some of them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from sim.api import Outcome, simulate_setup
from sim.scenario import ScenarioError, load_text
from sim.timeline.memory import MemoryTimeline

GIB = 1 << 30
FILE = Path(__file__).with_name("explorers.json")
Values = tuple[Any, ...]

LLAMA = """
model: {{preset: llama-3.1-8b, implementation: torchtitan, loss_chunks: 8}}
cluster: {{gpu: b200, gpus_per_node: 1}}
precision: {{parameters: bf16, compute: bf16}}
optimizer: {{name: sgd, clip_norm: null}}
batch: {{micro_batch: 1, seq_len: 4096}}
strategies: {{one: {{checkpoint: {checkpoint}}}}}
"""
OFFLOAD = """
model:
  {{preset: gpt2-xl, implementation: nanogpt, hidden: {hidden}, heads: {heads}, ffn_hidden: {ffn}, layers: 6,
    vocab: 1024, max_positions: 32768}}
cluster: {{gpu: h100-sxm-80gb, gpus_per_node: 1}}
precision: {{parameters: bf16, compute: bf16}}
optimizer: {{name: sgd, clip_norm: null}}
batch: {{micro_batch: 1, seq_len: {seq_len}}}
strategies: {{one: {{offload: {offload}}}}}
"""
PIPELINE = """
model: {{preset: gpt2-xl, implementation: nanogpt, vocab: 1024}}
cluster: {{gpu: h100-sxm-80gb, gpus_per_node: 8}}
precision: {{parameters: bf16, compute: bf16}}
batch: {{micro_batch: 1, seq_len: 1024, accumulation: {micro_batches}}}
parallel: {{pipeline: {{degree: {stages}, schedule: 1f1b}}, fsdp: {{degree: {replicas}}}}}
strategies: {{one: {{checkpoint: {checkpoint}}}}}
"""
CHAIN = """
model: {{chain: {{layers: {layers}, entry: 16 MiB, activation: 128 MiB, forward: 1 ms, backward: 2 ms, recompute: 1 ms}}}}
cluster: {{gpu: b200, gpus_per_node: 1}}
strategies: {{one: {{checkpoint: {{segment: {segment}}}}}}}
"""


def play(text: str) -> Outcome:
    """The only strategy of a scenario text."""
    return simulate_setup(load_text(text).strategies[0])


def kept_bytes(memory: MemoryTimeline) -> int:
    """Bytes that the step's peak has above what is there at its start."""
    first, last = memory.steps()[-1]
    return int(memory.active_bytes[first:last].max() - memory.active_bytes[max(first - 1, 0)])


def checkpoint_point(every: int, first: int) -> Values:
    """Peak GiB, extra compute (% of a forward), GiB saved against no checkpointing."""
    plain = play(LLAMA.format(checkpoint="null")).steady.active_bytes
    outcome = (
        play(LLAMA.format(checkpoint=f"{{every: {every}, first: {first}}}"))
        if first
        else play(LLAMA.format(checkpoint="null"))
    )
    peak = outcome.steady.active_bytes
    assert outcome.time is not None
    extra = outcome.time.recompute_of_forward
    return round(peak / GIB, 2), round(100 * extra, 1), round((plain - peak) / GIB, 2)


def offload_point(hidden: int, seq_len: int) -> Values | None:
    """Step time with offload over that without, GiB kept on the GPU, copy over compute time of a layer; None where the
    layers do not fit without."""
    from sim.plan.offload import copy_over_compute

    shape = {"hidden": hidden, "heads": hidden // 128, "ffn": 4 * hidden, "seq_len": seq_len}
    with_it = play(OFFLOAD.format(offload="{what: activations, streams: side}", **shape))
    plain = play(OFFLOAD.format(offload="null", **shape))
    if with_it.time is None or plain.time is None:
        return None
    ratio = copy_over_compute(hidden, seq_len, 0.5 * 989e12, 50e9)
    saved = (plain.steady.active_bytes - with_it.steady.active_bytes) / GIB
    return round(with_it.time.step_ns / plain.time.step_ns, 3), round(saved, 2), round(ratio, 2)


def pipeline_point(micro_batches: int, stages: int, recompute: str) -> Values:
    """Bubble over busy time in %, peak GiB of the fullest rank, step in ms."""
    checkpoint = "{every: 1}" if recompute == "every layer" else "null"
    text = PIPELINE.format(stages=stages, micro_batches=micro_batches, replicas=8 // stages, checkpoint=checkpoint)
    outcome = play(text)
    assert outcome.time is not None and outcome.bubble_fraction is not None
    peak = max(rank.steady.active_bytes for rank in outcome.ranks)
    return round(100 * outcome.bubble_fraction, 1), round(peak / GIB, 2), round(outcome.time.step_ns / 1e6, 1)


def chain_point(segment: int, layers: int) -> Values | None:
    """Peak in activations of one layer (128 MiB), entries kept, extra forwards in %."""
    if segment > layers:
        return None
    outcome = play(CHAIN.format(layers=layers, segment=segment))
    assert outcome.time is not None
    extra = outcome.time.recompute_of_forward
    return round(kept_bytes(outcome.memory) / (128 << 20), 2), -(-layers // segment), round(100 * extra, 1)


EXPLORERS: tuple[dict[str, Any], ...] = (
    {
        "id": "checkpoint",
        "title": "Checkpoint every k-th of the first N layers",
        "text": "Llama-3.1-8B, one GPU, one sequence of 4,096 tokens, bf16, loss in 8 chunks.",
        "axes": [
            {"name": "every k-th layer", "values": [1, 2, 3, 4, 6, 8], "start": 0},
            {"name": "of the first N layers", "values": [0, 4, 8, 12, 16, 20, 24, 28, 32], "start": 8},
        ],
        "metrics": ["peak, GiB", "extra compute, % of a forward", "saved, GiB"],
        "shown": [0, 1],
        "point": checkpoint_point,
    },
    {
        "id": "offload",
        "title": "Does offload hide? Hidden size and sequence length",
        "text": "GPT layers on an H100: what a layer keeps goes to host memory while the next computes. It hides where "
        "copying takes no longer than computing.",
        "axes": [
            {"name": "hidden size h", "values": [1024, 2048, 4096, 8192, 12288], "start": 2},
            {"name": "sequence length s", "values": [1024, 2048, 4096, 8192, 16384, 32768], "start": 2},
        ],
        "metrics": ["step with offload over plain", "saved, GiB", "copy over compute (closed form)"],
        "shown": [0, 2],
        "log": True,
        "point": offload_point,
    },
    {
        "id": "pipeline",
        "title": "1F1B: stages, micro-batches, recompute",
        "text": "The layers of GPT-2 XL on 8 H100s: p stages, the rest data parallel (FSDP2); m micro-batches of one sequence.",
        "axes": [
            {"name": "micro-batches m", "values": [2, 4, 8, 16, 32], "start": 2},
            {"name": "stages p", "values": [2, 4, 8], "start": 1},
            {"name": "recompute", "values": ["nothing", "every layer"], "start": 0},
        ],
        "metrics": ["bubble, % of busy time", "peak, GiB", "step, ms"],
        "shown": [0, 1],
        "log": True,
        "point": pipeline_point,
    },
    {
        "id": "segments",
        "title": "Segments, and the square root of n",
        "text": "A chain of n equal layers: recomputing segments of k keeps n/k entries and one segment's activations.",
        "axes": [
            {"name": "layers per segment k", "values": [1, 2, 4, 8, 16, 32, 64], "start": 2},
            {"name": "layers n", "values": [16, 32, 64, 128], "start": 2},
        ],
        "metrics": ["peak, in activations of one layer", "entries kept", "extra compute, % of a forward"],
        "shown": [0, 1],
        "log": True,
        "point": chain_point,
    },
)  # fmt: skip


def points(explorer: dict[str, Any], said: Callable[[str], None]) -> Iterator[list[Any] | None]:
    """All points of an explorer, the last axis fastest; None where there is no such run."""
    for values in product(*(axis["values"] for axis in explorer["axes"])):
        try:
            found = explorer["point"](*values)
        except ScenarioError:
            found = None
        said(f"{explorer['id']} {values}: {found}")
        yield None if found is None else list(found)


def main() -> None:
    """Simulate everything and write the file."""
    whole = []
    for explorer in EXPLORERS:
        plain = {key: value for key, value in explorer.items() if key != "point"}
        whole.append(plain | {"points": list(points(explorer, print))})
    FILE.write_text(json.dumps({"explorers": whole}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
