"""Published rows whose CPU holds and steps states: the sections that say so, and those of other programs."""

from __future__ import annotations

import pytest

from sim.checks.expressible import NotExpressible
from tests.unit.published_rows import document


def test_zero_3_with_optimizer_parameters_and_checkpoints_on_the_host() -> None:
    text = "optimizer_cpu+params_cpu+activation_ckpt_cpu"
    found = document(fsdp_or_zero="zero3", offload=text, recompute="full")
    expected = {"degree": 8, "stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
    assert found["parallel"]["zero"] == expected
    assert found["offload"] == {"what": "checkpoint_inputs"}


def test_zero_of_one_gpu_is_a_family_once_its_optimizer_leaves() -> None:
    alone = {"fsdp_or_zero": "zero2", "num_gpus": "1", "dp": "1", "global_batch": "4"}
    offloaded = document(offload="optimizer_cpu", **alone)
    assert offloaded["parallel"]["zero"] == {"degree": 1, "stage": 2, "offload_optimizer": "cpu"}
    assert document(**alone)["parallel"] == {}


def test_torchtunes_offload_is_fsdp2s_with_the_units_of_its_recipe() -> None:
    torchtune = {"source": "torchtune README", "model_name": "Llama 3.1 70B", "notes": "finetune method=full"}
    states = document(offload="params/optimizer cpu offload (FSDP)", **torchtune)
    assert states["parallel"]["fsdp"] == {"degree": 8, "cpu_offload": True, "units": "torchtitan_2026"}
    assert states["precision"]["reduce"] == "bf16"


def test_states_that_another_program_keeps_on_the_host_are_not_expressible() -> None:
    with pytest.raises(NotExpressible, match="offload of states"):
        document(offload="optimizer 50%", source="Megatron-Bridge perf skills", fsdp_or_zero="zero1")
