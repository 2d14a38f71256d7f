"""Megatron's losses: what each form holds, how much its kernels move, when ranks meet in it.

T tokens, V rows of the vocabulary on a rank. Bytes by hand from the code of megatron-core 0.16 and Transformer Engine; the
regions of `native` as Inductor of torch 2.13 cuts them.
"""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import simulate_setup
from sim.model.catalogue import build_model, preset_shapes
from sim.model.faults import ModelError
from sim.program.kernels import Memory
from sim.program.program import Phase, Program, Row
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.unit.test_tensor_parallel import meetings

T, V = 512, 131072
TEXT = """
model: {preset: gpt-tiny, implementation: megatron, vocab: %d, loss_fusion: FUSION, dropout: 0.0}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: %d}
precision: {parameters: bf16, compute: bf16}
parallel: {data: {degree: DEGREE}, tensor: {degree: TENSOR}}
allocator: "off"
"""


def setup_of(fusion: str, tensor: int = 1) -> Setup:
    text = TEXT.replace("FUSION", fusion).replace("DEGREE", str(8 // tensor)).replace("TENSOR", str(tensor))
    return load_text(text % (V * tensor, T), "loss").strategies[0]


def test_compiled_regions_copy_the_softmax_in_backward() -> None:
    """Beside softmax in fp32 and gradient in bf16. Without fusion small tensors of 14 bytes per token lie there instead."""
    peaks = {fusion: simulate_setup(setup_of(fusion)).steady.allocated_bytes for fusion in ("none", "native", "te")}
    assert peaks["native"] - peaks["none"] == 4 * T * V - 14 * T
    assert peaks["te"] < peaks["none"] - 3 * T * V


FORWARD = {
    "none": [2 + 4, 4, 4 + 4, 4 + 4, 4, 4 + 4],  # to fp32, max, subtract, exp, sum, divide
    "native": [2 + 4, 4 + 4, 4 + 4],
    "te": [2, 2 + 2],
}
"""Bytes that each pass over the logits reads and writes, per logit."""


@pytest.mark.parametrize("fusion", FORWARD)
def test_each_form_passes_over_the_logits_so_often(fusion: str) -> None:
    program = record(setup_of(fusion), 1)
    rows = np.flatnonzero(program.row_kind == Row.LAUNCH).tolist()
    in_loss = [row for row in rows if program.where(int(program.row_where[row]))[0] == Phase.LOSS]
    moved = [bytes_of(program, row) for row in in_loss]
    assert [round(size / (T * V)) for size in moved if size > T * V] == FORWARD[fusion]


def bytes_of(program: Program, row: int) -> int:
    work = program.kernels[program.row_argument[row]].work
    assert isinstance(work, Memory)
    return work.bytes


@pytest.mark.parametrize(
    "fusion, kinds", [("none", 3 * ["all_reduce"]), ("native", 2 * ["all_reduce"]), ("te", ["all_gather"])]
)
def test_ranks_that_split_the_vocabulary_meet_less_often(fusion: str, kinds: list[str]) -> None:
    assert [kind for kind, _ in meetings(record(setup_of(fusion, 8), 1), Phase.LOSS, "")] == kinds


def test_other_code_has_no_such_loss() -> None:
    with pytest.raises(ModelError, match="loss_fusion"):
        build_model("gpt-tiny", preset_shapes("gpt-tiny"), "nanogpt", {"loss_fusion": "te"})
