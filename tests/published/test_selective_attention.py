"""Selective recomputation of attention (Korthikanti et al. 2022): what it saves and what it costs, by both definitions.

Attention written out keeps 5 a s / h of every 34 + 5 a s / h (in units of s b h); two products of 2 b s^2 h FLOPs run
again. "Of a forward" and "of a step" count the FLOPs of the layers, a backward twice those of a forward.
"""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.program.program import Mem, Phase, Program
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup

TEXT = """
model: {preset: gpt-tiny, implementation: megatron, layers: LAYERS, hidden: HIDDEN, ffn_hidden: FFN, heads: HEADS,
        vocab: 1024, max_positions: 2048, dropout: 0.1, attention: ATTENTION}
cluster: {gpu: a100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 2048}
precision: {parameters: bf16, compute: bf16}
"""
CORE = "{inside: core_attention, reentrant: true}"
GPT3, MT_NLG = (12288, 96), (20480, 128)


def setup_of(shape: tuple[int, int], layers: int, checkpoint: str, attention: str = "unfused") -> Setup:
    hidden, heads = shape
    values = {"LAYERS": layers, "HIDDEN": hidden, "FFN": 4 * hidden, "HEADS": heads, "ATTENTION": attention}
    text = TEXT
    for name, value in values.items():
        text = text.replace(name, str(value))
    return load_text(f"{text}checkpoint: {checkpoint}\n", "selective").strategies[0]


def after_forward(setup: Setup) -> int:
    """Bytes alive at the end of the first forward."""
    program = record(setup, steps=1)
    (end,) = (mark.memory_events for mark in program.marks if mark.name == "s0.fwd0")
    kind, handle = program.mem_kind[:end], program.mem_handle[:end]
    sizes = np.zeros(int(handle.max()) + 1, np.int64)
    sizes[handle[kind == Mem.ALLOC]] = program.mem_bytes[:end][kind == Mem.ALLOC]
    return int(sizes[handle[kind == Mem.ALLOC]].sum() - sizes[handle[kind != Mem.ALLOC]].sum())


def kept_per_layer(shape: tuple[int, int], checkpoint: str, attention: str = "unfused") -> int:
    """Activations of one layer: what a second one adds, less its parameters."""
    hidden = shape[0]
    parameters = 2 * (12 * hidden**2 + 13 * hidden)
    one, two = (after_forward(setup_of(shape, layers, checkpoint, attention)) for layers in (1, 2))
    return two - one - parameters


def layer_flops(program: Program, phase: Phase) -> int:
    """FLOPs of matrix products and attention in the layers, in a phase."""
    total = 0
    for kind, argument, where in zip(program.row_kind, program.row_argument.tolist(), program.row_where.tolist()):
        here, path, _ = program.where(where)
        if here == phase and path.startswith("layers.") and kind == 0:
            total += program.kernels[argument].work.flops
    return total


@pytest.mark.parametrize(("shape", "share"), [(GPT3, 0.70), (MT_NLG, 0.65)])
def test_share_of_activations_saved(shape: tuple[int, int], share: float) -> None:
    all_kept, selective = kept_per_layer(shape, "null"), kept_per_layer(shape, CORE)
    assert all_kept - selective == 5 * shape[1] * 2048**2
    assert round(1 - selective / all_kept, 2) == share


@pytest.mark.parametrize(("shape", "of_forward", "of_step"), [(GPT3, 2.7, 0.90), (MT_NLG, 1.6, 0.55)])
def test_share_of_flops_spent(shape: tuple[int, int], of_forward: float, of_step: float) -> None:
    program = record(setup_of(shape, 2, CORE), steps=1)
    forward, again = layer_flops(program, Phase.FORWARD), layer_flops(program, Phase.RECOMPUTE)
    backward = layer_flops(program, Phase.BACKWARD)
    assert again == 2 * 4 * shape[0] * 2048**2
    assert backward == 2 * forward
    assert round(100 * again / forward, 1) == of_forward
    assert round(100 * again / (forward + backward), 2) == of_step


def test_with_flash_attention_it_saves_next_to_nothing() -> None:
    """AC-04: less than 5 %. The output projection keeps the output; only the statistics go."""
    all_kept, selective = (kept_per_layer(GPT3, form, "sdpa") for form in ("null", CORE))
    assert 0 <= 1 - selective / all_kept < 0.05


def test_flash_attention_is_faster_than_standard_attention_that_recomputes_nothing() -> None:
    times = [step_ns(setup_of((4096, 32), 4, form, attention)) for form, attention in VARIANTS]
    flash, standard, standard_recomputing = times
    assert flash < standard < standard_recomputing


VARIANTS = (("null", "sdpa"), ("null", "unfused"), (CORE, "unfused"))


def step_ns(setup: Setup) -> float:
    time = simulate_setup(setup).time
    assert time is not None
    return time.step_ns
