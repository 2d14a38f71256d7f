"""What a GPT layer keeps for backward, against the closed forms of Korthikanti et al. (2022): 34 sbh + 5 a s^2 b.

Letters: s tokens, b sequences, h hidden, a heads; sizes in bytes with 16-bit activations. Two layer norms keep a mean
and a reciprocal deviation per token in fp32: 16 sb more, which the closed form leaves out.
"""

from __future__ import annotations

import numpy as np
import pytest

from sim.program.program import PATH_MASK, PATH_SHIFT, Mem, Owner, Program
from sim.runtime.record import record
from sim.scenario import load_text

SMALL = [(64, 2, 128, 4, 2), (96, 1, 256, 8, 3), (128, 3, 192, 6, 2)]
GPT3 = (2048, 1, 12288, 96, 96)
FLASH_RNG = 24  # two philox words and an unused one
SHAPES = [*SMALL, GPT3]


def program_of(shape: tuple[int, ...], strategy: str = "{}", attention: str = "unfused") -> Program:
    s, b, h, a, layers = shape
    model = f"{{preset: gpt-3-175b, implementation: megatron, layers: {layers}, hidden: {h}, ffn_hidden: {4 * h}, "
    model += f"heads: {a}, kv_heads: {a}, head_dim: {h // a}, attention: {attention}}}"
    scenario = load_text(
        f"model: {model}\nbatch: {{micro_batch: {b}, seq_len: {s}}}\n"
        "cluster: {gpu: h100, gpus_per_node: 1}\nprecision: {parameters: bf16, compute: bf16}\n"
        f"strategies: {{s: {strategy}}}\n",
        "layer",
    )
    return record(scenario.strategies[0], steps=1)


def alive_at(program: Program, mark: str) -> list[int]:
    """Numbers of the allocations alive at a mark."""
    stop = next(m.memory_events for m in program.marks if m.name == mark)
    kinds, handles = program.mem_kind[:stop], program.mem_handle[:stop]
    return sorted(set(handles[kinds == Mem.ALLOC].tolist()) - set(handles[kinds == Mem.FREE].tolist()))


def saved_per_layer(program: Program, layers: int) -> list[int]:
    """Activation bytes that each layer's operators made and that are alive after forward.

    A layer's output counts for it, its input does not: over a stack of equal layers that is what a layer saves.
    """
    made = program.mem_kind == Mem.ALLOC
    sizes, where = program.mem_bytes[made], program.mem_where[made]
    total = [0] * layers
    for handle in alive_at(program, "s0.fwd0"):
        path = program.paths[int(where[handle]) >> PATH_SHIFT & PATH_MASK]
        if program.owners[handle] == Owner.ACTIVATION and path.startswith("layers."):
            total[int(path.split(".")[1])] += int(sizes[handle])
    return total


def owned_bytes(program: Program, owner: Owner) -> int:
    sizes = program.mem_bytes[program.mem_kind == Mem.ALLOC]
    return sum(int(sizes[h]) for h in alive_at(program, "s0.fwd0") if program.owners[h] == owner)


def highest_bytes(program: Program, owner: Owner) -> int:
    """The most bytes of an owner alive at once."""
    sizes = program.mem_bytes[program.mem_kind == Mem.ALLOC][program.mem_handle]
    signed = np.where(program.mem_kind == Mem.ALLOC, sizes, -sizes)
    return int(np.cumsum(np.where(program.owners[program.mem_handle] == owner, signed, 0)).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_with_attention_written_out_saves_34_sbh_and_5_as2b(shape: tuple[int, ...]) -> None:
    s, b, h, a, layers = shape
    assert saved_per_layer(program_of(shape), layers) == [34 * s * b * h + 5 * a * s * s * b + 16 * s * b] * layers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_with_flash_attention_saves_34_sbh_and_one_number_per_row(shape: tuple[int, ...]) -> None:
    s, b, h, a, layers = shape
    saved = 34 * s * b * h + 4 * a * s * b + 16 * s * b + FLASH_RNG
    assert saved_per_layer(program_of(shape, attention="sdpa"), layers) == [saved] * layers


def test_the_layers_of_gpt3_save_275_gb_and_with_flash_attention_82() -> None:
    s, b, _, a, layers = GPT3
    unfused = saved_per_layer(program_of(GPT3), layers)
    assert (round(unfused[0] / 1e9, 2), round(sum(unfused) / 1e9)) == (2.87, 275)
    assert round(100 * 5 * a * s * s * b / unfused[0]) == 70
    flash = saved_per_layer(program_of(GPT3, attention="sdpa"), layers)
    assert (round(flash[0] / 1e9, 2), round(sum(flash) / 1e9)) == (0.86, 82)


def test_checkpointing_every_layer_of_gpt3_keeps_96_inputs_and_recomputes_one_layer() -> None:
    s, b, h, a, layers = GPT3
    program = program_of(GPT3, "{checkpoint: {every: 1}}")
    inputs = owned_bytes(program, Owner.CHECKPOINT)
    assert inputs == layers * 2 * s * b * h
    assert round(inputs / 1e9, 1) == 4.8
    assert saved_per_layer(program, layers)[:-1] == [0] * (layers - 1)
    # the textbook's "one layer" is what it saves (2.87 GB); while it is recomputed the scores lie beside them (3.12 GB)
    assert highest_bytes(program, Owner.RECOMPUTED) == 7 * a * s * s * b + 12 * s * b * h + 8 * s * b
