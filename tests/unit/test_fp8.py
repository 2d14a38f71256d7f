"""Transformer Engine's 8-bit products: which they are, what is saved, cast, gathered and kept, and what may be asked for."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from sim.model.build import build_model
from sim.program.kernels import Gemm, Memory
from sim.program.program import Owner, Phase, Program, Row
from sim.runtime.fp8 import BLOCKS, NVFP4_CASTS
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.runtime.train_pipeline import record_pipeline
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems

TEXT = """
model: {preset: llama-tiny, implementation: megatron, layers: LAYERS}
cluster: {gpu: GPU, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 512, accumulation: 3}
precision: {parameters: bf16, compute: bf16, KIND: RECIPE}
parallel: PARALLEL
"""
ALONE = "{data: {degree: 8, distributed_optimizer: true}}"
SHARED = "{data: {degree: 4, distributed_optimizer: true}, tensor: {degree: 2, sequence_parallel: true}}"
WHOLE = "{data: {degree: 4}, tensor: {degree: 2}}"
STORED = "{data: {degree: 8, distributed_optimizer: true, fp8_parameters: true}}"
PIPELINE = "{data: {degree: 2}, pipeline: {degree: 4}}"
RECIPES = (("h100", "delayed"), ("h100", "tensorwise"), ("h100", "blockwise"), ("b200", "delayed"),
           ("b200", "tensorwise"), ("b200", "mxfp8"),
           ("b200", "nvfp4"))  # fmt: skip
TOKENS = 1024


def said(recipe: str) -> str:
    return f"{'fp4' if recipe == 'nvfp4' else 'fp8'}: {recipe}"


def setup_of(gpu: str, recipe: str, parallel: str = ALONE, more: str = "", layers: int = 6) -> Setup:
    text = TEXT.replace("GPU", gpu).replace("PARALLEL", parallel).replace("KIND: RECIPE", said(recipe))
    return load_text(text.replace("LAYERS", str(layers)) + more, "fp8").strategies[0]


def products(program: Program, phase: Phase, layer: str) -> list[tuple[str, str]]:
    """(last part of the module's path, dtype) of every product of a phase under a path, in order."""
    found = []
    for row in np.flatnonzero(program.row_kind == Row.LAUNCH).tolist():
        kernel = program.kernels[program.row_argument[row]]
        place = program.where(int(program.row_where[row]))
        if isinstance(kernel.work, Gemm) and place[0] == phase and place[1].startswith(layer):
            found.append((place[1].rpartition(".")[2], kernel.work.dtype))
    return found


def launches(program: Program, name: str, start: str = "init", stop: str = "s0.end") -> list[int]:
    """Bytes moved by every launch of a kernel between two marks."""
    rows = {mark.name: mark.rows for mark in program.marks}
    found = []
    for row in range(rows[start], rows[stop]):
        kernel = program.kernels[program.row_argument[row]] if program.row_kind[row] == Row.LAUNCH else None
        if kernel is not None and kernel.name == name and isinstance(kernel.work, Memory):
            found.append(kernel.work.bytes)
    return found


def collectives(program: Program, start: str = "init", stop: str = "s0.end") -> list[tuple[str, str, int]]:
    """(kind, dtype, bytes) of what was issued between two marks."""
    rows = {mark.name: mark.rows for mark in program.marks}
    made = (program.collectives[program.row_argument[r]] for r in range(rows[start], rows[stop])
            if program.row_kind[r] == Row.COLLECTIVE)  # fmt: skip
    return [(c.kind, c.dtype, c.bytes) for c in made]


def saved_bytes(setup: Setup, owner: Owner = Owner.ACTIVATION) -> int:
    """Bytes of an owner that are alive when the first forward is over."""
    program = record(setup, 1)
    events = next(mark.memory_events for mark in program.marks if mark.name == "s0.fwd0")
    alive: dict[int, int] = {}
    for event in range(events):
        handle = int(program.mem_handle[event])
        if program.mem_kind[event] == 0 and program.owners[handle] == owner:
            alive[handle] = int(program.mem_bytes[event])
        elif program.mem_kind[event] == 1:
            alive.pop(handle, None)
    return sum(alive.values())


# Which products


def test_the_layers_four_products_are_in_8_bit_and_nothing_else() -> None:
    program = record(setup_of("h100", "delayed"), 1)
    forward = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert products(program, Phase.FORWARD, "layers.2")[:4] == [(name, "fp8") for name in forward]
    backward = products(program, Phase.BACKWARD, "layers.2")[:8]
    assert backward == [(name, "fp8") for name in reversed(forward) for _ in range(2)]
    assert {dtype for _, dtype in products(program, Phase.FORWARD, "output_layer")} == {"bf16"}


def test_in_4_bit_amaxes_come_first_and_columns_are_transformed() -> None:
    program = record(setup_of("b200", "nvfp4"), 1)
    assert {dtype for _, dtype in products(program, Phase.FORWARD, "layers.2")} == {"fp4"}
    counts = [len(launches(program, name, "s0.fwd0", "s0.bwd0")) for name in ("hadamard_transform_amax", *NVFP4_CASTS)]
    assert counts == [6 * 4, 6 * 4, 6 * 4]  # x of every product; weights are cast by one kernel each
    inputs = launches(program, "quantize_nvfp4", "s0.fwd0", "s0.bwd0")
    h = setup_of("b200", "nvfp4").model.hidden  # type: ignore[union-attr]
    assert inputs[0] == TOKENS * h * 2 + TOKENS * h // 2 + TOKENS * h // 16


def test_layers_at_the_edge_stay_as_they_are() -> None:
    edge = record(setup_of("h100", "delayed", more="strategies: {a: {precision: {fp8_edge_layers: 2}}}"), 1)
    dtypes = [{d for _, d in products(edge, Phase.FORWARD, f"layers.{n}")} for n in range(6)]
    assert dtypes == [{"bf16"}, {"bf16"}, {"fp8"}, {"fp8"}, {"bf16"}, {"bf16"}]


# What is saved


@pytest.mark.parametrize(("gpu", "recipe"), RECIPES)
def test_inputs_are_saved_in_8_bit_and_attention_keeps_its_result_beside(gpu: str, recipe: str) -> None:
    """Per token of a layer: 2 h (qkv), 2 h (fc1) and 2 f (fc2) become h + h + f, and h more for proj, whose 16-bit input is
    attention's result. Each with its scales."""
    fp8, bf16 = setup_of(gpu, recipe), setup_of(gpu, "null")
    h, f = fp8.model.hidden, fp8.model.ffn_hidden  # type: ignore[union-attr]
    scales = (3 * h + f) * TOKENS // BLOCKS[recipe] if recipe in BLOCKS else 4 * 4
    scales *= 4 if recipe == "blockwise" else 1
    per_layer = TOKENS * (h + f) - scales
    if recipe == "nvfp4":  # half of 8 bit
        per_layer += TOKENS * (3 * h + f) // 2
    assert saved_bytes(bf16) - saved_bytes(fp8) == 6 * per_layer


def test_gathered_tokens_are_saved_by_each_rank_alone() -> None:
    fp8, bf16 = setup_of("h100", "delayed", SHARED), setup_of("h100", "null", SHARED)
    h, f = fp8.model.hidden, fp8.model.ffn_hidden  # type: ignore[union-attr]
    assert saved_bytes(bf16) - saved_bytes(fp8) == 6 * (TOKENS * (h + f) // 2 - 16)


# What is cast and kept


def test_weights_are_cast_once_per_step_whatever_the_number_of_micro_batches() -> None:
    setup = setup_of("h100", "delayed", layers=5)
    program = record(setup, 2)
    of_weights = sorted(4 * prod(shape) for shape in _matrices(setup))  # 2 read, 1 written in each form
    for step in (0, 1):
        first = launches(program, "cast_transpose", f"s{step - 1}.end" if step else "init", f"s{step}.fwd0")
        second = launches(program, "cast_transpose", f"s{step}.bwd0", f"s{step}.fwd1")
        assert sorted(first) == sorted(second + of_weights)


def blocks(size: int) -> int:
    return -(-size // 128)


def _matrices(setup: Setup) -> list[tuple[int, ...]]:
    model = build_model(setup.model, setup.tensor)  # type: ignore[arg-type]
    return [slot.shape for slot in model.parameters() if slot.in_fp8]


@pytest.mark.parametrize(
    ("gpu", "recipe", "forms"),
    [("h100", "delayed", 2), ("b200", "tensorwise", 1), ("b200", "mxfp8", 2), ("h100", "blockwise", 2)],
)
def test_copies_of_weights_stay_beside_the_16_bit_ones(gpu: str, recipe: str, forms: int) -> None:
    """One byte per weight and form, with scales; Hopper needs the transposed one, mxfp8 the one with other scales."""
    setup = setup_of(gpu, recipe)
    elements = sum(map(prod, _matrices(setup)))
    scales = forms * elements // 32 if recipe == "mxfp8" else forms * 4 * len(_matrices(setup))
    if recipe == "blockwise":  # a number in fp32 per 128 x 128 weights, rows of them padded to fours
        scales = sum(
            4 * blocks(n) * -(-blocks(k) // 4) * 4 + 4 * blocks(k) * -(-blocks(n) // 4) * 4 for n, k in _matrices(setup)
        )
    statistics = 4 * 2 * (3 + 2) * len(_matrices(setup)) if recipe == "delayed" else 0
    more = saved_bytes(setup, Owner.OTHER) - saved_bytes(setup_of(gpu, "null"), Owner.OTHER)
    assert more == forms * elements + scales + statistics
    assert saved_bytes(setup, Owner.PARAMETER) == saved_bytes(setup_of(gpu, "null"), Owner.PARAMETER)


def test_weights_stored_in_8_bit_halve_their_bytes_and_their_gathers() -> None:
    setup, kept = setup_of("h100", "delayed", STORED), setup_of("h100", "delayed")
    elements = sum(map(prod, _matrices(setup)))
    assert saved_bytes(kept, Owner.PARAMETER) - saved_bytes(setup, Owner.PARAMETER) == elements
    kinds = {dtype: size for kind, dtype, size in collectives(record(setup, 1)) if kind == "all_gather"}
    assert kinds["fp8"] == elements
    assert sum(size for kind, _, size in collectives(record(kept, 1)) if kind == "all_gather") > 1.9 * elements


def test_delayed_scaling_agrees_on_amaxes_twice_per_micro_batch() -> None:
    sizes = [size for kind, _, size in collectives(record(setup_of("h100", "delayed"), 1)) if kind == "all_reduce"]
    forward, backward = 6 * 4 * 3 * 4, 6 * 4 * 2 * 4
    assert [s for s in sizes if s in (forward, backward)] == 3 * [forward, backward]


def test_current_scaling_reads_everything_once_more() -> None:
    delayed, tensorwise = (record(setup_of("h100", recipe), 1) for recipe in ("delayed", "tensorwise"))
    assert not launches(delayed, "amax_kernel")
    normed, plain, gradients, weights = 0, 2 * 6 * 3, 4 * 6 * 3, 4 * 6
    assert len(launches(tensorwise, "amax_kernel")) == normed + plain + gradients + weights


# Who meets


def test_tokens_and_gradients_are_gathered_in_8_bit() -> None:
    whole = [c for c in collectives(record(setup_of("h100", "delayed", SHARED), 1), "init", "s0.bwd0") if c[2] > 1000]
    h = 64
    gathers = [(dtype, size) for kind, dtype, size in whole if kind == "all_gather" and dtype == "fp8"]
    h = setup_of("h100", "delayed").model.hidden  # type: ignore[union-attr]
    # forward: before qkv and fc1; backward: both again, and the gradients of proj's and fc2's results
    assert gathers == 6 * (2 + 2 + 2) * [("fp8", TOKENS * h)]
    assert {dtype for kind, dtype, _ in whole if kind == "reduce_scatter"} == {"bf16"}


def test_without_sequence_parallelism_ranks_sum_in_16_bit() -> None:
    made = collectives(record(setup_of("h100", "delayed", WHOLE), 1), "init", "s0.bwd0")
    assert not [c for c in made if c[0] == "all_gather"]
    fp8 = [c for c in made if c[0] == "all_reduce" and c[1] == "bf16"]
    bf16 = [c for c in collectives(record(setup_of("h100", "null", WHOLE), 1), "init", "s0.bwd0") if c[1] == "bf16"]
    assert fp8 == bf16


# The same program, sooner


@pytest.mark.parametrize(("gpu", "recipe"), RECIPES)
@pytest.mark.parametrize("parallel", [ALONE, SHARED])
def test_stamped_equals_live(gpu: str, recipe: str, parallel: str) -> None:
    setup = setup_of(gpu, recipe, parallel, layers=8)
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_folded_equals_whole(recipe: str) -> None:
    setup = setup_of("h100", recipe, PIPELINE, "strategies: {a: {batch: {accumulation: 24}}}", layers=8)
    for rank in (0, 3):
        folded = record_pipeline(setup, rank, 3)
        assert_equal(folded, record_pipeline(setup, rank, 3, stamps=False, folds=False))


def test_recomputed_layers_do_not_cast_weights_again() -> None:
    setup = setup_of("h100", "delayed", more="checkpoint: {every: 1}")
    program = record(setup, 1)
    big = {4 * prod(shape) for shape in _matrices(setup)}
    assert not big & set(launches(program, "cast_transpose", "s0.fwd0", "s0.bwd0"))


# What may be asked for


def spoiled(old: str, new: str, gpu: str = "h100", recipe: str = "delayed", parallel: str = ALONE) -> list[str]:
    text = (
        TEXT.replace("GPU", gpu)
        .replace("PARALLEL", parallel)
        .replace("LAYERS", "6")
        .replace("KIND: RECIPE", said(recipe))
    )
    assert old in text
    return [f"{path}: {message}" for _, path, message in problems(text.replace(old, new))]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("megatron", "torchtitan", "for megatron's Llama-like models"),
        ("parallel: " + ALONE, "", "add parallel.data"),
        ("compute: bf16", "compute: fp32", "beside 16 bit only"),
        ("fp8: delayed", "fp8: mxfp8", "compute capability 10.0"),
        ("fp8: delayed", "fp8: delayed, float8: tensorwise", "the other torchao's"),
        ("fp8: delayed", "fp8: delayed, fp8_edge_layers: 3", "leaves none of 6 layers"),
        ("fp8: delayed", "fp8_edge_layers: 1", "which is not set"),
        ("gpu: h100", "gpu: a100", "no 8-bit matrix units"),
        ("fp8: delayed", "fp4: nvfp4", "no known rate of products in 4 bit"),
        ("fp8: delayed", "fp8: delayed, fp4: nvfp4", "products are in 8 bit or in 4"),
        ("distributed_optimizer: true", "fp8_parameters: true", "needs distributed_optimizer"),
        ("parallel:", "mode: no_grad\nparallel:", "for mode: train only"),
        ("parallel:", "checkpoint: {discard: norm}\nparallel:", "not modelled with precision.fp8"),
        ("parallel:", "checkpoint: {inside: norm}\nparallel:", "norms are inside"),
        ("parallel:", "checkpoint: {save: [aten.mm]}\nparallel:", "no operators of aten"),
        ("parallel: " + ALONE, "parallel: {fsdp: {degree: 8}}", "weights are gathered in 8 bit"),
        ("parallel: " + ALONE, "parallel: {data: {degree: 4}, pipeline: {degree: 2, schedule: zb-h1}}", "splits backward"),
        ("layers: 6", "layers: 6, hidden: 520, ffn_hidden: 1000, heads: 5, kv_heads: 5", "multiples of 16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(old: str, new: str, says: str) -> None:
    assert any(says in problem for problem in spoiled(old, new)), spoiled(old, new)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("megatron", "torchtitan", "precision.fp4: nvfp4: is Transformer Engine's"),
        ("parallel: " + ALONE, "parallel: {fsdp: {degree: 8}}", "precision.fp4: nvfp4: under fsdp"),
        (
            "parallel:",
            "checkpoint: {discard: norm}\nparallel:",
            "is not modelled with precision.fp4",
        ),
        (
            "layers: 6",
            "layers: 6, hidden: 520, ffn_hidden: 1000, heads: 5, kv_heads: 5",
            "precision.fp4: products need",
        ),
    ],
)
def test_what_does_not_fit_4_bit_is_told_of_4_bit(old: str, new: str, says: str) -> None:
    assert any(says in problem for problem in spoiled(old, new, "b200", "nvfp4")), spoiled(old, new, "b200", "nvfp4")


def test_blocks_of_128_are_for_hopper() -> None:
    assert any("is for Hopper" in problem for problem in spoiled("gpu: h100", "gpu: b200", recipe="blockwise"))


def test_under_fsdp_weights_come_gathered_in_8_bit_and_hopper_transposes_them_in_backward() -> None:
    parallel = "{fsdp: {degree: 8, float8_all_gather: true}}"
    program = record(setup_of("h100", "tensorwise", parallel), 1)
    assert {dtype for _, dtype in products(program, Phase.FORWARD, "layers.2")} == {"fp8"}
    transposed = sorted(launches(program, "transpose"))
    shapes = sorted(2 * prod(shape) for shape in _matrices(setup_of("h100", "tensorwise")))
    assert transposed == sorted(3 * shapes)
    assert not launches(record(setup_of("b200", "tensorwise", parallel), 1), "transpose")


def test_in_a_pipeline_the_edges_are_those_of_the_whole_model() -> None:
    more = "strategies: {a: {precision: {fp8_edge_layers: 1}, batch: {accumulation: 8}}}"
    setup = setup_of("h100", "delayed", PIPELINE, more, layers=8)
    found = []
    for rank in range(4):
        program = record(setup, 1, rank=rank)
        found += [{d for _, d in products(program, Phase.FORWARD, f"layers.{n}.")} for n in (2 * rank, 2 * rank + 1)]
    assert found == [{"bf16"}, *[{"fp8"}] * 6, {"bf16"}]
