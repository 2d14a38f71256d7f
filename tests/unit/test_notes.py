"""What a run says of settings that do nothing, and of bytes per parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.api import simulate_setup
from sim.model.config import ModelConfig
from sim.model.flops import parameter_count
from sim.program.program import Mem, Owner
from sim.report.notes import between, longest_region, notes
from sim.report.parameter_bytes import bytes_per_parameter
from sim.report.summary import StrategySummary, summarize
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Scenario, Setup
from tests.unit.scenario_texts import problems

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


def test_adapters_that_keep_activations_are_named() -> None:
    adapted = TEXT.replace("layers: 8", "layers: 8, lora: {rank: 8, targets: all}").replace("OPTIMIZER", FOREACH)
    outcome = simulate_setup(load_text(adapted.replace("PARAMETERS", "bf16"), "notes").strategies[0])
    assert "not activations" in " ".join(notes(outcome))


def test_states_that_checkpointing_does_not_touch_are_named() -> None:
    text = TEXT.replace("micro_batch: 4, seq_len: 1024", "micro_batch: 1, seq_len: 2048").replace("PARAMETERS", "bf16")
    text = text.replace("layers: 8", "layers: 8, vocab: 2048").replace("OPTIMIZER", "{clip_norm: null}")
    setup = load_text(text + "checkpoint: {segment: 2}\n", "notes").strategies[0]
    said = " ".join(notes(simulate_setup(setup)))
    assert "does not touch parameters, gradients and optimizer states" in said


def compared(strategies: str) -> tuple[Scenario, list[StrategySummary]]:
    text = TEXT.replace("OPTIMIZER", FOREACH).replace("PARAMETERS", "bf16")
    scenario = load_text(f"{text}strategies: {strategies}\n", "notes")
    return scenario, [summarize(simulate_setup(setup)) for setup in scenario.strategies]


def test_strategies_that_train_on_different_tokens_are_named() -> None:
    said = between(*compared("{short: {}, long: {batch: {seq_len: 2048}}, double: {batch: {accumulation: 2}}}"))
    assert said == (
        "Tokens per step differ (4,096 in short; 8,192 in long and double): compare tokens per second, not step times.",
    )


def test_a_setting_without_effect_is_named() -> None:
    said = between(*compared("{plain: {}, logged: {checkpoint: {first: 2}}, prefetch: {checkpoint: {first: 2}}}"))
    assert "logged and prefetch are alike in every figure: what they differ in has no effect here." in said


def test_regions_around_the_wrong_module_are_named() -> None:
    scenario, (plain, norms) = compared("{plain: {}, norms: {checkpoint: {inside: norm}}}")
    assert plain.step_time_s is not None
    norms = replace(norms, step_time_s=1.05 * plain.step_time_s)
    (said,) = between(scenario, [plain, norms])
    assert said.startswith("norms recomputes for 5% more time than plain and lowers the peak by")
    assert not between(scenario, [plain, replace(norms, peak_active_bytes=plain.peak_active_bytes // 2)])


def test_reserved_bytes_that_do_not_fall_with_allocated_ones_are_named() -> None:
    scenario, (plain, full) = compared("{plain: {}, full: {checkpoint: {}}}")
    assert not between(scenario, [plain, full])
    (said,) = between(scenario, [plain, replace(full, peak_reserved_bytes=plain.peak_reserved_bytes)])
    assert said.startswith("full allocates") and "reserves none less" in said


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
        ("bf16", "{master_weights: true, fp32_gradients: true}", 20),
        ("bf16", "{master_weights: true, clip_norm: null, in_backward: true}", 14),
        ("fp32", "{name: sgd, momentum: 0.9}", 12),
        ("bf16", "{name: sgd}", 4),
        ("fp16", "{master_weights: true}", 18),
        ("bf16", "{name: adamw-8bit}", 6 + 8 / 256),
    ],
)
def test_bytes_per_parameter_by_name(parameters: str, optimizer: str, total: float) -> None:
    assert sum(bytes_per_parameter(setup_of(optimizer=optimizer, parameters=parameters)).values()) == total


def kept_bytes(setup: Setup, *owners: Owner) -> int:
    """What these owners hold after a step."""
    program = record(setup, steps=1)
    freed = set(program.mem_handle[program.mem_kind == Mem.FREE].tolist())
    states = {handle for handle, owner in enumerate(program.owners) if owner in owners} - freed
    allocations = zip(program.mem_kind, program.mem_handle.tolist(), program.mem_bytes.tolist())
    return sum(size for kind, handle, size in allocations if kind == Mem.ALLOC and handle in states)


@pytest.mark.parametrize(("parameters", "optimizer"), [("bf16", FOREACH), ("fp32", "{name: sgd, momentum: 0.9}")])
def test_bytes_per_parameter_are_those_that_are_allocated(parameters: str, optimizer: str) -> None:
    setup = setup_of(optimizer=optimizer, parameters=parameters)
    kept = kept_bytes(setup, Owner.OPTIMIZER)
    *_, count = bytes_per_parameter(setup).values()
    assert isinstance(setup.model, ModelConfig)
    assert kept == count * parameter_count(setup.model)


def test_twenty_bytes_per_parameter_stay_after_a_step() -> None:
    """DeepSpeed's BF16_Optimizer on one rank: 2 + 2 + 4 + 4 + 8."""
    setup = setup_of(optimizer="{variant: foreach, master_weights: true, fp32_gradients: true}")
    kept = kept_bytes(setup, Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER)
    assert isinstance(setup.model, ModelConfig)
    assert kept == 20 * parameter_count(setup.model)


@pytest.mark.parametrize(
    ("optimizer", "more", "says"),
    [
        ("{fp32_gradients: true}", "", "needs master_weights"),
        ("{master_weights: true, fp32_gradients: true}", "parallel: {fsdp: {degree: 1}}\n", "not with parallel.fsdp"),
        ("{master_weights: true}", "parallel: {fsdp: {degree: 1, cpu_offload: true}}\n", "not modelled on the CPU"),
    ],
)
def test_gradients_in_fp32_stay_on_one_gpu(optimizer: str, more: str, says: str) -> None:
    found = problems(TEXT.replace("OPTIMIZER", optimizer).replace("PARAMETERS", "bf16") + more)
    assert any(says in text for _, _, text in found), found


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
