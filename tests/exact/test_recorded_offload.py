"""What leaves for the host, in bytes, against recordings of real PyTorch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import sim
from sim.api import simulate_setup
from sim.program.program import Program, Row
from sim.runtime.record import record
from sim.scenario import load_text
from tests.exact.allocator_recordings import find, load
from tests.exact.recorded_setup import llama_setup

ROOT = Path(__file__).resolve().parents[2]
COUNTED_FROM_BYTES = 64 << 10
"""The recording device counts pinned blocks from this size on."""
PINNED = [
    (name, path)
    for kind in ("step", "last_step")
    for name, path in find()[kind]
    if "offload" in name and "1gpu" in name and "fsdp" in str(path)
]
GPT_BLOCK = """
model: {preset: gpt-tiny, implementation: nanogpt, layers: 1, hidden: 256, ffn_hidden: 1024, heads: 4, kv_heads: 4,
  vocab: 1024, max_positions: 256, dropout: 0.1, bias: false}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 4, seq_len: 256}
precision: {parameters: bf16, compute: bf16}
offload: {what: saved_tensors, layers: all}
"""


def shared_file(*parts: str) -> dict[str, Any]:
    path = Path(os.environ.get("SIM_SHARED", ROOT.parent / "shared")).joinpath("data", *parts)
    if not path.exists():
        pytest.skip(f"recording not present: {parts[-1]}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def leaving(program: Program) -> list[int]:
    """Bytes of every copy to the host, in order."""
    numbers = program.row_argument[program.row_kind == Row.COPY].tolist()
    return [program.copies[n].bytes for n in numbers if program.copies[n].direction == "device_to_host"]


def test_save_on_cpu_moves_every_saved_tensor_of_a_gpt_block_weights_and_duplicates_too() -> None:
    recorded = shared_file("pytorch", "e2e_offload.json")["gpt/save_on_cpu/L1"]
    out = leaving(record(load_text(GPT_BLOCK, "gpt").strategies[0], steps=1))
    assert sorted(out) == sorted(int(size) for _, size in recorded["d2h_shapes_L1"])
    assert (len(out), sum(out)) == (recorded["n_d2h"], recorded["d2h_bytes"]) == (28, 11_044_888)


@pytest.mark.parametrize(("name", "path"), PINNED, ids=[name for name, _ in PINNED])
def test_pinned_bytes_are_those_of_a_recorded_step(name: str, path: Path) -> None:
    """Blocks are powers of two, kept and used again from the second step on."""
    meta = load(path)["meta"]
    program = record(llama_setup(meta), steps=3)
    blocks = [1 << (size - 1).bit_length() for size in leaving(program)]
    counted = sum(block for block in blocks if block >= COUNTED_FROM_BYTES)
    assert counted == 3 * meta["pinned_peak"]
    assert program.host_bytes.max() == sum(blocks) // 3


def test_offloading_the_inputs_of_8b_has_the_recorded_peaks() -> None:
    """Recording 8b_fsdp8_b1_full_offload, less the 512 bytes that its script holds; pinned: 32 x (64 + 4) MiB of inputs
    and rope caches, besides the tables of the gathers."""
    offload = ("strategies.full.offload={what: checkpoint_inputs}",)
    scenario = sim.load(ROOT / "scenarios/fsdp_ckpt.yaml", offload)
    outcome = simulate_setup(next(setup for setup in scenario.strategies if setup.name == "full"))
    assert outcome.steady.active_bytes + 512 == 27_397_932_032
    assert outcome.steady.reserved_bytes == 37_878_759_424
    assert outcome.host_peak_bytes == 32 * (64 + 4) << 20
