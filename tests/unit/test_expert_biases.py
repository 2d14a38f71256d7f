"""GPT-OSS's experts in Megatron's code: biases of the second product and clamps, op by op, beside Mixtral's."""

from __future__ import annotations

import pytest

from sim.model.catalogue import build_model as config_of
from sim.model.catalogue import preset_shapes
from sim.model.flops import parameter_count
from sim.program.kernels import Memory
from sim.program.program import Owner, Phase, Program, Row
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems

TEXT = """
model: {preset: mixtral-tiny, implementation: megatron, layers: LAYERS, experts: {EXPERTS}}
cluster: {gpu: b200, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 256}
precision: {parameters: bf16, compute: bf16, fp8: RECIPE}
parallel: {data: {degree: 8, distributed_optimizer: true}, expert: {degree: 4}}
"""
H, F, E, K, LAYERS, TOKENS = 512, 768, 8, 2, 4, 512
N = TOKENS * K
"""Rows at a rank's two experts."""


def setup_of(experts: str, recipe: str = "null", layers: int = LAYERS) -> Setup:
    text = TEXT.replace("EXPERTS", experts).replace("RECIPE", recipe).replace("LAYERS", str(layers))
    return load_text(text, "biases").strategies[0]


def moved(program: Program, names: tuple[str, ...], phase: Phase) -> list[tuple[str, int]]:
    """(kernel, bytes) in the third layer's experts in the first forward or backward."""
    found = []
    for row in range(next(mark.rows for mark in program.marks if mark.name == "s0.end")):
        if program.row_kind[row] != Row.LAUNCH:
            continue
        kernel, place = program.kernels[program.row_argument[row]], program.where(int(program.row_where[row]))
        inside = place[0] == phase and place[1].startswith("layers.2.moe.experts")
        if inside and kernel.name in names and isinstance(kernel.work, Memory):
            found.append((kernel.name, kernel.work.bytes))
    return found


def saved_bytes(setup: Setup) -> int:
    program, alive = record(setup, 1), dict[int, int]()
    for event in range(next(mark.memory_events for mark in program.marks if mark.name == "s0.fwd0")):
        handle = int(program.mem_handle[event])
        if program.mem_kind[event] == 0 and program.owners[handle] == Owner.ACTIVATION:
            alive[handle] = int(program.mem_bytes[event])
        elif program.mem_kind[event] == 1:
            alive.pop(handle, None)
    return sum(alive.values())


def test_every_expert_has_two_biases() -> None:
    plain, biased = (
        config_of("mixtral-tiny", {**preset_shapes("mixtral-tiny"), "experts": {**EXPERTS, **more}}, "megatron")
        for more in ({}, {"bias": True})
    )
    assert parameter_count(biased) - parameter_count(plain) == LAYERS * E * (2 * F + H)


EXPERTS = preset_shapes("mixtral-tiny")["experts"]


@pytest.mark.parametrize(("dtype", "wide"), [("fp32", 4), ("compute", 2)])
def test_biases_of_the_second_product_are_weighted_and_added_expert_by_expert(dtype: str, wide: int) -> None:
    """Two experts of N/2 rows: the product with the weights, the sum, all joined; then back to 16 bit."""
    program = record(setup_of(f"bias: true, router_dtype: {dtype}"), 1)
    names = ("aten::mul", "aten::add", "aten::cat", "aten::copy_")
    half = N // 2 * H
    each = [("aten::mul", wide * half), ("aten::add", half * (2 + 2 * wide))]
    joined = [("aten::cat", 2 * wide * N * H)] + ([("aten::copy_", N * H * (4 + 2))] if wide == 4 else [])
    assert moved(program, names, Phase.FORWARD) == 2 * each + joined


def test_clamps_keep_both_halves_and_what_is_joined_of_them() -> None:
    assert saved_bytes(setup_of("clamped: true")) - saved_bytes(setup_of("clamped: false")) == LAYERS * N * 2 * F * 2
    program = record(setup_of("clamped: true"), 1)
    forward = moved(program, ("aten::clamp", "aten::cat"), Phase.FORWARD)
    assert forward == 2 * [("aten::clamp", 2 * 2 * N * F)] + [("aten::cat", 2 * 2 * N * 2 * F)]
    assert moved(program, ("aten::where",), Phase.BACKWARD) == 2 * [("aten::where", 3 * 2 * N * F)]


@pytest.mark.parametrize("recipe", ["null", "mxfp8"])
def test_stamped_equals_live(recipe: str) -> None:
    setup = setup_of("bias: true, clamped: true", recipe, layers=8)
    assert_equal(record_training(setup, 3), record_training(setup, 3, stamps=False))


def test_biases_get_main_gradients() -> None:
    """In fp32, in the buffer of the rank's experts."""

    def buffers(setup: Setup) -> int:
        program = record(setup, 1)
        made = next(mark.memory_events for mark in program.marks if mark.name == "s0.fwd0")
        of = [int(program.mem_handle[event]) for event in range(made) if program.mem_kind[event] == 0]
        sizes = [int(b) for b, k in zip(program.mem_bytes[:made], program.mem_kind[:made]) if k == 0]
        return sum(size for handle, size in zip(of, sizes) if program.owners[handle] == Owner.GRADIENT)

    assert buffers(setup_of("bias: true")) - buffers(setup_of("bias: false")) == 4 * LAYERS * (E // 4) * (2 * F + H)


def test_transformers_experts_have_neither() -> None:
    text = TEXT.replace("EXPERTS", "bias: true").replace("RECIPE", "null").replace("LAYERS", "4")
    text = text.replace("megatron", "transformers").replace(", expert: {degree: 4}", "")
    assert any("is Megatron's" in message for _, _, message in problems(text))
