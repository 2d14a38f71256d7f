"""What a run says of settings that do nothing, and of bytes per parameter."""

from __future__ import annotations

import pytest

from sim.api import simulate_setup
from sim.model.config import ModelConfig
from sim.model.flops import parameter_count
from sim.program.program import Mem, Owner
from sim.report.notes import longest_region, notes
from sim.report.parameter_bytes import bytes_per_parameter
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup

TEXT = """
model: {preset: llama-tiny, implementation: torchtitan, layers: 8}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 4, seq_len: 1024}
precision: {parameters: PARAMETERS, compute: bf16}
optimizer: OPTIMIZER
"""
FOREACH = "{variant: foreach, clip_norm: null}"


def setup_of(more: str = "", optimizer: str = FOREACH, parameters: str = "bf16") -> Setup:
    text = TEXT.replace("OPTIMIZER", optimizer).replace("PARAMETERS", parameters) + more
    return load_text(text, "notes").strategies[0]


def said(more: str = "", optimizer: str = FOREACH) -> str:
    return " ".join(notes(simulate_setup(setup_of(more, optimizer))))


def test_checkpointing_under_no_grad_has_no_effect() -> None:
    plain, checkpointed = (simulate_setup(setup_of(f"mode: no_grad\ncheckpoint: {c}\n")) for c in ("null", "{}"))
    assert plain.steady == checkpointed.steady
    assert "no effect under no_grad" in " ".join(notes(checkpointed))
    assert notes(plain) == ()


def test_a_graph_that_nobody_walks_back_is_named() -> None:
    assert "Without torch.no_grad()" in said("mode: eval\n")


def test_regions_that_are_too_long_are_named() -> None:
    assert "one of 8 layers holds" in said("checkpoint: {segment: 8}\n")
    assert "regions are long" not in said("checkpoint: {}\n")


def test_activations_that_are_not_the_peak_are_named() -> None:
    small = "checkpoint: {}\nbatch: {micro_batch: 1, seq_len: 64}\n"
    text = TEXT.replace("batch: {micro_batch: 4, seq_len: 1024}\n", "").replace("OPTIMIZER", FOREACH)
    setup = load_text(text.replace("PARAMETERS", "bf16") + small, "notes").strategies[0]
    assert "gradients and optimizer states are more" in " ".join(notes(simulate_setup(setup)))


def test_a_step_inside_backward_that_comes_too_late_is_named() -> None:
    assert "before most gradients" in said(optimizer="{in_backward: true, clip_norm: null}")


@pytest.mark.parametrize(
    ("checkpoint", "layers"),
    [
        ("null", 1), ("{}", 1), ("{segment: 4}", 4), ("{nested: [2, 2]}", 2), ("{boundaries: [1, 6]}", 5),
        ("{sequential: 2}", 4), ("{inside: mlp}", 1),
    ],
)  # fmt: skip
def test_the_longest_region(checkpoint: str, layers: int) -> None:
    assert longest_region(setup_of(f"checkpoint: {checkpoint}\n")) == layers


@pytest.mark.parametrize(
    ("parameters", "optimizer", "total"),
    [
        ("bf16", FOREACH, 8),
        ("fp32", FOREACH, 16),
        ("fp32", "{variant: foreach, clip_norm: null, in_backward: true}", 12),
        ("bf16", "{master_weights: true}", 18),
        ("bf16", "{master_weights: true, clip_norm: null, in_backward: true}", 14),
        ("fp32", "{name: sgd, momentum: 0.9}", 12),
        ("bf16", "{name: sgd}", 4),
        ("bf16", "{name: adamw-8bit}", 6 + 8 / 256),
    ],
)
def test_bytes_per_parameter_by_name(parameters: str, optimizer: str, total: float) -> None:
    assert sum(bytes_per_parameter(setup_of(optimizer=optimizer, parameters=parameters)).values()) == total


@pytest.mark.parametrize(("parameters", "optimizer"), [("bf16", FOREACH), ("fp32", "{name: sgd, momentum: 0.9}")])
def test_bytes_per_parameter_are_those_that_are_allocated(parameters: str, optimizer: str) -> None:
    setup = setup_of(optimizer=optimizer, parameters=parameters)
    program = record(setup, steps=1)
    freed = set(program.mem_handle[program.mem_kind == Mem.FREE].tolist())
    states = {handle for handle, owner in enumerate(program.owners) if owner == Owner.OPTIMIZER} - freed
    allocations = zip(program.mem_kind, program.mem_handle.tolist(), program.mem_bytes.tolist())
    kept = sum(size for kind, handle, size in allocations if kind == Mem.ALLOC and handle in states)
    *_, count = bytes_per_parameter(setup).values()
    assert isinstance(setup.model, ModelConfig)
    assert kept == count * parameter_count(setup.model)


@pytest.mark.parametrize(("data", "total"), [("degree: 8", 18), ("degree: 8, distributed_optimizer: true", 7.5)])
def test_bytes_per_parameter_of_megatrons_loop(data: str, total: float) -> None:
    """Korthikanti et al. count 18; a distributed optimizer over d replicas leaves 6 + 12 / d."""
    text = TEXT.replace("torchtitan", "megatron").replace("gpus_per_node: 1", "gpus_per_node: 8")
    text = text.replace("PARAMETERS", "bf16").replace("OPTIMIZER", "{}") + f"parallel: {{data: {{{data}}}}}\n"
    setup = load_text(text, "notes").strategies[0]
    assert sum(bytes_per_parameter(setup).values()) == total


def test_balanced_experts_are_said_to_be_assumed() -> None:
    text = TEXT.replace("llama-tiny, implementation: torchtitan", "mixtral-tiny").replace("OPTIMIZER", "null")
    setup = load_text(text.replace("PARAMETERS", "bf16"), "notes").strategies[0]
    assert any("model.experts.imbalance" in note for note in notes(simulate_setup(setup)))
