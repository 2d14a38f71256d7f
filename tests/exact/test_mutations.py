"""Tests of the test: with any one rule of the runtime broken, the comparison with recordings notices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.exact import mutations as m
from tests.exact.allocator_recordings import HERE, load
from tests.exact.compare import compare

NOTICED_BY: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (m.gradients_are_never_added_in_place, "train_amp_dropout_ckpt"),
    (m.gradients_are_never_added_in_place, "tiny_fsdp8_op"),
    (m.gradients_are_always_added_in_place, "train_bf16_accum2_clip"),
    (m.unpacked_tensors_outlive_the_bias_sum, "train_amp_dropout_ckpt"),
    (m.saved_tensors_die_before_the_bias_sum, "train_bf16_accum2_clip"),
    (m.mm_computes_dx_before_dw, "train_bf16_accum2_clip"),
    (m.mm_computes_dx_before_dw, "tiny_fsdp8_op"),
    (m.mul_computes_self_before_other, "tiny_fsdp8_op"),
    (m.complex_factors_need_no_conjugate_copy, "tiny_fsdp8_op"),
    (m.linear_folds_its_input_before_weight_t, "tiny_1gpu_bf16_none_accum2"),
    (m.autocast_casts_left_to_right, "train_amp_dropout_ckpt"),
    (m.autocast_caches_nothing, "train_amp_dropout_ckpt"),
    (m.kernels_have_no_temporaries, "train_bf16_accum2_clip"),
    (m.flash_never_splits_keys, "tiny_fsdp8_op"),
    (m.python_frames_hold_no_attention_tensors, "train_amp_dropout_ckpt"),
    (m.recomputation_runs_to_the_end, "train_bf16_mathsdp_ckpt"),
    (m.recomputation_runs_to_the_end, "tiny_fsdp8_op"),
    (m.selective_checkpointing_keeps_nothing, "tiny_fsdp8_op"),
    (m.selective_outputs_die_after_the_recomputation, "tiny_fsdp8_op"),
    (m.gathered_output_dies_before_the_next_copy_out, "tiny_fsdp8_op"),
    (m.gathered_output_dies_after_its_own_copy_out, "tiny_fsdp8_op"),
    (m.last_gradient_dies_with_the_others, "tiny_fsdp8_op"),
    (m.gradients_die_before_the_reduction_begins, "tiny_fsdp8_op"),
    (m.reduce_input_dies_with_its_unit, "tiny_fsdp8_op"),
    (m.reduce_inputs_live_to_the_end, "tiny_fsdp8_op"),
    (m.reduction_begins_before_the_reshard, "tiny_fsdp8_op"),
    (m.backward_gathers_nothing_ahead, "tiny_fsdp8_op"),
    (m.everything_is_on_one_stream, "tiny_fsdp8_op"),
    (m.kernels_need_no_pointer_tables, "tiny_fsdp8_op"),
    (m.every_gradient_has_its_own_buffer, "tiny_fsdp8_op"),
    (m.norms_are_reduced_without_buffers, "tiny_fsdp8_op"),
    (m.parameters_are_never_kept_by_fewer_ranks, "tiny_fsdp8_raf4_none"),
    (m.the_graph_dies_with_an_out_of_memory_error, "train_gpt2s_bf16_ckpt_tight"),
]


@cache
def recording(name: str) -> dict[str, Any]:
    return load(next(HERE.rglob(f"{name}.json.gz")))


@pytest.mark.parametrize("name", sorted({name for _, name in NOTICED_BY}))
def test_without_a_mutation_the_recording_is_equal(name: str) -> None:
    assert compare(name, recording(name)).differences == ()


@pytest.mark.parametrize(("mutation", "name"), NOTICED_BY, ids=[f"{f.__name__}-{name}" for f, name in NOTICED_BY])
def test_a_broken_rule_is_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    difference = compare(name, recording(name)).differences[0]
    assert difference.startswith(("allocation", "address"))
