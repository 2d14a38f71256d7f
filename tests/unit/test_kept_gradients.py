"""DeepSpeed's BF16_Optimizer: 16-bit gradients stay until the next backward, fp32 copies are added to the main ones."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.program.kernels import Memory
from sim.program.program import Mem, Owner, Program, Row
from sim.runtime.record import record
from sim.scenario import ScenarioError, load_text
from sim.scenario.setup import Setup

TEXT = """
model: {preset: gpt-tiny, implementation: megatron, layers: 8}
cluster: {gpu: a100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 256, accumulation: MICRO_BATCHES}
precision: {parameters: bf16, compute: bf16}
parallel: {data: {DATA}PIPELINE}
strategies: {s: {}}
"""
APART = "degree: 8, distributed_optimizer: true, gradient_accumulation_fusion: false"
KEPT = "degree: 8, distributed_optimizer: true, keep_gradients: true"


def setup_of(data: str, micro_batches: int = 3, pipeline: str = "") -> Setup:
    text = TEXT.replace("DATA", data).replace("PIPELINE", pipeline).replace("MICRO_BATCHES", str(micro_batches))
    return load_text(text, "kept").strategies[0]


def gradient_work(program: Program) -> Counter[tuple[str, int]]:
    """Kernels that cast and add, by name and bytes."""
    launched = program.row_argument[program.row_kind == Row.LAUNCH].tolist()
    kernels = [program.kernels[number] for number in launched]
    return Counter(
        (k.name, k.work.bytes) for k in kernels if isinstance(k.work, Memory) and k.work.family == "elementwise"
    )


def test_every_parameter_is_cast_and_added_after_every_backward() -> None:
    """6 and 12 bytes per element in the place of 10."""
    kept, apart = (gradient_work(record(setup_of(data), 1)) for data in (KEPT, APART))
    parameters = Counter(p for p in sizes_of(setup_of(KEPT)) for _ in range(3))
    more, less = kept - apart, apart - kept
    assert more == Counter({("aten::copy_", 6 * n): c for n, c in parameters.items()}) + Counter(
        {("aten::add_", 12 * n): c for n, c in parameters.items()}
    )
    assert less == Counter({("aten::add_", 10 * n): c for n, c in parameters.items()})


def sizes_of(setup: Setup) -> list[int]:
    """Elements of every parameter, from the shapes of their storages (2 bytes each)."""
    program = record(setup, 1)
    alloc = program.mem_kind == Mem.ALLOC
    owned = program.owners[program.mem_handle[alloc]] == Owner.PARAMETER
    return [int(size) // 2 for size in program.mem_bytes[alloc][owned].tolist()]


def test_two_bytes_per_parameter_more_are_held_after_a_step() -> None:
    kept, apart = (record(setup_of(data), 1) for data in (KEPT, APART))
    assert held(kept, Owner.GRADIENT) - held(apart, Owner.GRADIENT) == 2 * sum(sizes_of(setup_of(KEPT)))


def held(program: Program, owner: Owner) -> int:
    """Bytes of an owner at the program's end."""
    alloc = program.mem_kind == Mem.ALLOC
    sizes = dict(zip(program.mem_handle[alloc].tolist(), program.mem_bytes[alloc].tolist()))
    for handle in program.mem_handle[program.mem_kind == Mem.FREE].tolist():
        del sizes[handle]
    return sum(size for handle, size in sizes.items() if program.owners[handle] == owner)


def test_main_gradients_are_summed_whole() -> None:
    program = record(setup_of(KEPT), 1)
    assert "reduce_scatter" not in {collective.kind for collective in program.collectives}


@pytest.mark.parametrize(
    ("data", "pipeline", "message"),
    [
        (f"{KEPT}, overlap: true", "", "cannot be reduced beside it (overlap)"),
        (KEPT.replace("8", "4"), ", pipeline: {degree: 2, schedule: zb-h1}", "where backwards are split (zb-h1)"),
    ],
)
def test_what_kept_gradients_cannot_do_is_said(data: str, pipeline: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        setup_of(data, 4, pipeline)
    assert "parallel.data.keep_gradients" in str(caught.value)
    assert message in str(caught.value)
