"""Small scenarios for the tests of reports, and how the command line is called."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from sim.cli import app

ROOT = Path(__file__).parents[2]

TINY = """
description: a tiny Llama, sharded over two GPUs
model:     {preset: llama-tiny, implementation: torchtitan}
cluster:   {gpu: h100, gpus_per_node: 2}
batch:     {micro_batch: 2, seq_len: 512}
parallel:  {fsdp: {degree: 2}}
strategies:
  none: {}
  full: {checkpoint: {every: 1}}
"""

CHAIN = """
model:
  chain: {layers: 6, entry: 16 MiB, activation: 128 MiB, forward: 1 ms, backward: 2 ms, recompute: 1 ms}
cluster: {gpu: h100, gpus_per_node: 1}
strategies:
  none:    {}
  by-two:  {checkpoint: {segment: 2}}
"""

PIPELINE = """
model: {preset: gpt-tiny, implementation: nanogpt, layers: 6}
cluster: {gpu: h100, gpus_per_node: 4}
batch: {micro_batch: 1, seq_len: 256, accumulation: 4}
precision: {parameters: bf16, compute: bf16}
parallel: {pipeline: {degree: 2}, fsdp: {degree: 2}}
strategies:
  1f1b:        {}
  interleaved: {parallel: {pipeline: {schedule: interleaved, virtual: 3}}}
"""

TIGHT = "cluster.usable_memory=1 GiB"
"""On the chain: none (768 MiB and a context of 512) does not fit, by-two does."""
TIGHTER = "cluster.usable_memory=700 MiB"
"""On the chain: nothing fits."""


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def sim(*arguments: object) -> Result:
    """Call the command line in this process, one strategy at a time where it runs any."""
    words = [str(argument) for argument in arguments]
    if words and words[0] in ("run", "compare"):
        words[1:1] = ["--jobs", "1"]
    return CliRunner().invoke(app, words)
