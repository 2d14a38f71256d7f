"""DeepSpeed's JSON, accelerate's YAML, torchtitan's TOML and Hugging Face's config.json become scenarios."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.interop import Entry, ImportProblems, Options
from tests.unit.imports import CONFIG, FSDP, H100, LLAMA, TITAN, ZERO3_OFFLOAD, imported


def deepspeed(folder: Path, text: str, options: Options = LLAMA):
    return imported(folder, "deepspeed", "ds.json", text, options)


def accelerate(folder: Path, text: str, options: Options = LLAMA):
    return imported(folder, "accelerate", "fsdp.yaml", text, options)


def test_zero_3_with_offload_is_zero_3_with_offload(tmp_path: Path) -> None:
    found = deepspeed(tmp_path, ZERO3_OFFLOAD, replace(LLAMA, nodes=2))
    setup = found.scenario.strategies[0]
    assert (setup.model.name, setup.model.implementation) == ("llama-3.1-8b", "transformers")
    assert setup.zero is not None
    assert (setup.zero.degree, setup.zero.stage) == (16, 3)
    assert (setup.zero.offload_optimizer, setup.zero.offload_param) == ("cpu", "cpu")
    assert (setup.batch.micro_batch, setup.batch.accumulation, setup.batch.seq_len) == (2, 4, 4096)
    assert (setup.precision.parameters, setup.precision.compute, setup.precision.reduce) == ("bf16", "bf16", "bf16")
    assert setup.optimizer is not None and setup.optimizer.clip_norm == 1.0
    assert found.account.is_whole
    assert Entry("zero_optimization.offload_param.device", 6, "parallel.zero.offload_param: cpu") in found.account.used


def test_deepspeeds_sequence_parallelism_is_ulysses(tmp_path: Path) -> None:
    """Eight GPUs, two groups of four: the batch counts groups."""
    text = """{"bf16": {"enabled": true}, "sequence_parallel_size": 4, "train_batch_size": 4,
        "zero_optimization": {"stage": 3}}"""
    found = deepspeed(tmp_path, text)
    setup = found.scenario.strategies[0]
    assert (setup.context.degree, setup.context.kind, setup.data_parallel) == (4, "ulysses", 2)
    assert setup.zero is not None and (setup.zero.degree, setup.zero.stage) == (8, 3)
    assert (setup.batch.micro_batch, setup.batch.accumulation) == (2, 1)
    assert found.account.is_whole, found.account.not_expressible


@pytest.mark.parametrize("size", [3, 0])
def test_sequences_go_evenly_over_the_gpus(size: int, tmp_path: Path) -> None:
    text = f'{{"bf16": {{"enabled": true}}, "sequence_parallel_size": {size}, "zero_optimization": {{"stage": 3}}}}'
    with pytest.raises(ImportProblems) as raised:
        deepspeed(tmp_path, text)
    assert "do not divide 8 GPUs" in str(raised.value)


def test_ulysses_without_zero_is_told(tmp_path: Path) -> None:
    found = deepspeed(tmp_path, '{"bf16": {"enabled": true}, "sequence_parallel_size": 2}')
    assert [entry.name for entry in found.account.not_expressible if "sequence" in entry.name]


def test_zero_offload_of_one_gpu_keeps_the_parameters_there(tmp_path: Path) -> None:
    text = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    setup = deepspeed(tmp_path, text, replace(LLAMA, gpus_per_node=1)).scenario.strategies[0]
    assert setup.zero is not None
    assert (setup.zero.degree, setup.zero.stage, setup.zero.offload_optimizer) == (1, 2, "cpu")


def test_zero_infinity_keeps_states_and_parameters_on_drives(tmp_path: Path) -> None:
    text = """{"bf16": {"enabled": true}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "sub_group_size": 1e8,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pipeline_read": true},
        "offload_param": {"device": "nvme", "nvme_path": "/local"}}}"""
    found = deepspeed(tmp_path, text)
    setup = found.scenario.strategies[0]
    assert setup.zero is not None and setup.optimizer is not None
    assert (setup.zero.offload_optimizer, setup.zero.offload_param, setup.zero.sub_group) == (
        "nvme",
        "nvme",
        100_000_000,
    )
    assert (setup.zero.pipeline_read, setup.zero.pipeline_write, setup.optimizer.clip_norm) == (True, False, 1.0)
    assert found.account.is_whole, found.account.not_expressible


def test_below_stage_3_states_on_nvme_stay_in_main_memory(tmp_path: Path) -> None:
    text = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}'
    setup = deepspeed(tmp_path, text).scenario.strategies[0]
    assert setup.zero is not None and setup.zero.offload_optimizer == "cpu"


def test_zero_2_is_zero_2(tmp_path: Path) -> None:
    text = """{"fp16": {"enabled": true}, "communication_data_type": "fp32", "zero_optimization":
        {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true}}"""
    found = deepspeed(tmp_path, text)
    setup = found.scenario.strategies[0]
    assert setup.zero is not None
    assert (setup.zero.degree, setup.zero.stage, setup.zero.overlap_comm) == (8, 2, True)
    assert setup.zero.reduce_bucket == 200_000_000
    assert (setup.precision.parameters, setup.precision.compute, setup.precision.reduce) == ("fp16", "fp16", "fp32")
    assert found.account.is_whole, found.account.not_expressible


@pytest.mark.parametrize(
    "batch, expected",
    [
        ('"train_batch_size": 32', (4, 1)),
        ('"train_batch_size": 32, "gradient_accumulation_steps": 2', (2, 2)),
        ('"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1', (1, 4)),
        ('"train_micro_batch_size_per_gpu": 3', (3, 1)),
        ('"steps_per_print": 10', (1, 1)),
    ],
)
def test_deepspeed_finds_the_third_of_the_batch_sizes(batch: str, expected: tuple[int, int], tmp_path: Path) -> None:
    text = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, ' + batch + "}"
    setup = deepspeed(tmp_path, text).scenario.strategies[0]
    assert (setup.batch.micro_batch, setup.batch.accumulation) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"train_batch_size": 30}', "30 is no multiple of 8 GPUs x 1 micro-batches"),
        (
            '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
            "64 is not 2",
        ),
        ('{"zero_optimization": {"stage": 4}}', "4: a stage from 0 to 3"),
        ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "bf16 is enabled too"),
        ('{"zero_optimization": {"stage": 3, "stage": 2}}', "is given twice, first in line 1"),
        ("[1]", "names with values are expected"),
        ("{", "not JSON"),
    ],
)
def test_wrong_files_are_told(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ImportProblems) as raised:
        deepspeed(tmp_path, text)
    assert expected in str(raised.value)


def test_what_the_file_cannot_know_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ImportProblems) as raised:
        deepspeed(tmp_path, ZERO3_OFFLOAD, Options())
    said = str(raised.value)
    assert all(option in said for option in ("--gpu ", "--model ", "--seq-len ")), said


@pytest.mark.parametrize(
    "text, name",
    [
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            "zero_optimization.offload_param.device nvme",
        ),
        (
            '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}',
            "zero_optimization.zero_hpz_partition_size 8",
        ),
        ('{"zero_optimization": {"stage": 3}, "optimizer": {"type": "Lamb"}}', "optimizer.type Lamb"),
    ],
)
def test_what_has_an_effect_and_no_field_is_told(text: str, name: str, tmp_path: Path) -> None:
    assert name in [entry.name for entry in deepspeed(tmp_path, text).account.not_expressible]


def test_fsdp_of_accelerate(tmp_path: Path) -> None:
    found = accelerate(tmp_path, FSDP)
    setup = found.scenario.strategies[0]
    assert (setup.cluster.nodes, setup.cluster.gpus_per_node) == (2, 8)
    assert setup.fsdp1 is not None
    assert (setup.fsdp1.degree, setup.fsdp1.strategy, setup.fsdp1.backward_prefetch) == (16, "full_shard", "pre")
    assert (setup.fsdp1.use_orig_params, setup.fsdp1.limit_all_gathers, setup.fsdp1.forward_prefetch) == (
        False,
        True,
        False,
    )
    assert setup.checkpoint is not None and setup.checkpoint.every == 1
    assert setup.precision.compute == "bf16"
    assert found.account.is_whole


@pytest.mark.parametrize(
    "changes, path, value",
    [
        (("FULL_SHARD", "SHARD_GRAD_OP"), "fsdp1.strategy", "shard_grad_op"),
        (("FULL_SHARD", "2"), "fsdp1.strategy", "shard_grad_op"),
        (("FULL_SHARD", "NO_SHARD"), "fsdp1.strategy", "no_shard"),
        (("FULL_SHARD", "HYBRID_SHARD"), "fsdp1.replicas", 2),
        (("BACKWARD_PRE", "NO_PREFETCH"), "fsdp1.backward_prefetch", None),
        (("fsdp_offload_params: false", "fsdp_use_orig_params: true"), "fsdp1.use_orig_params", True),
        (("fsdp_offload_params: false", "fsdp_version: 2\n  fsdp_offload_params: true"), "fsdp.cpu_offload", True),
        (("fsdp_offload_params: false", "fsdp_version: 2"), "fsdp.degree", 16),
        (("fsdp_sharding_strategy: FULL_SHARD", "fsdp_version: 2\n  fsdp_reshard_after_forward: false"),
         "fsdp.reshard_after_forward", False),
        (("mixed_precision: bf16", "mixed_precision: 'no'"), "precision.compute", "fp32"),
        (("mixed_precision: bf16", "mixed_precision: bf16\ngradient_accumulation_steps: 8"), "batch.accumulation", 8),
        (("fsdp_state_dict_type: SHARDED_STATE_DICT",
          "fsdp_version: 2\n  fsdp_activation_checkpointing_offload: true"), "offload.what", "checkpoint_inputs"),
    ],
)  # fmt: skip
def test_a_setting_of_accelerate_becomes_a_field(
    changes: tuple[str, str], path: str, value: object, tmp_path: Path
) -> None:
    found: object = accelerate(tmp_path, FSDP.replace(*changes)).scenario.strategies[0]
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_zero_by_accelerates_fields(tmp_path: Path) -> None:
    text = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: cpu, gradient_clipping: 0.5}
mixed_precision: bf16
num_processes: 4
"""
    setup = accelerate(tmp_path, text).scenario.strategies[0]
    assert setup.zero is not None and (setup.zero.degree, setup.zero.offload_param) == (4, "cpu")
    assert setup.optimizer is not None and setup.optimizer.clip_norm == 0.5


def test_compiled_blocks_are_said_where_the_code_can_be_compiled(tmp_path: Path) -> None:
    compiled = torchtitan(tmp_path, TITAN + "\n[compile]\nenable = true\n")
    assert compiled.scenario.strategies[0].compile is not None and compiled.account.is_whole
    text = FSDP + "dynamo_config: {dynamo_backend: INDUCTOR}\n"
    refused = accelerate(tmp_path, text).account.not_expressible
    assert [entry.name for entry in refused] == ["dynamo_config.dynamo_backend INDUCTOR"]


def test_one_gpu_of_accelerate(tmp_path: Path) -> None:
    setup = accelerate(tmp_path, "distributed_type: 'NO'\nmixed_precision: bf16\n").scenario.strategies[0]
    assert (setup.cluster.gpus, setup.fsdp, setup.precision.autocast) == (1, None, True)


def test_a_config_of_hugging_face_stays_where_it_is(tmp_path: Path) -> None:
    found = imported(tmp_path, "hf", "config.json", CONFIG, replace(LLAMA, model=None, gpus_per_node=2))
    model = found.scenario.strategies[0].model
    assert (model.layers, model.hidden, model.kv_heads, model.vocab) == (4, 512, 2, 8192)
    assert found.document["model"]["config"] == str(tmp_path / "config.json")
    assert found.account.is_whole


def test_what_a_config_asks_for_and_is_not_modelled_is_told(tmp_path: Path) -> None:
    text = CONFIG.replace('"llama"', '"mistral"').replace('"torch_dtype"', '"sliding_window": 1024, "torch_dtype"')
    found = imported(tmp_path, "hf", "config.json", text, replace(LLAMA, model=None))
    assert [entry.name for entry in found.account.not_expressible] == ["sliding_window"]


def test_a_config_of_an_unknown_family_is_told(tmp_path: Path) -> None:
    with pytest.raises(ImportProblems, match="model_type"):
        imported(tmp_path, "hf", "config.json", CONFIG.replace('"llama"', '"rwkv"'), replace(LLAMA, model=None))


def torchtitan(folder: Path, text: str = TITAN, options: Options = H100):
    return imported(folder, "torchtitan", "job.toml", text, options)


def test_a_job_of_torchtitan(tmp_path: Path) -> None:
    found = torchtitan(tmp_path)
    setup = found.scenario.strategies[0]
    assert (setup.model.name, setup.model.implementation) == ("llama-3.1-8b", "torchtitan")
    assert setup.fsdp is not None and (setup.fsdp.degree, setup.fsdp.reshard_after_forward) == (8, "torchtitan")
    assert (setup.batch.micro_batch, setup.batch.seq_len, setup.batch.accumulation) == (1, 8192, 1)
    assert setup.checkpoint is not None and setup.checkpoint.save == ("attention", "every_second_matmul")
    assert found.account.is_whole
    assert Entry("model.flavor", 7, "model.preset: llama-3.1-8b") in found.account.used


@pytest.mark.parametrize(
    "changes, path, value",
    [
        (('selective_ac_option = "op"', 'selective_ac_option = "3"'), "checkpoint.every", 3),
        (('mode = "selective"', 'mode = "full"'), "checkpoint.every", 1),
        (("replicate_degree = 1", "replicate_degree = 2"), "fsdp.replicas", 2),
        (("replicate_degree = 1", "replicate_degree = 8"), "ddp.degree", 8),
        (("seq_len = 8192", "seq_len = 8192\nglobal_batch_size = 32"), "batch.accumulation", 4),
        (("seq_len = 8192", "enable_cpu_offload = true"), "fsdp.cpu_offload", True),
        (("max_norm = 1.0", "max_norm = 0.0"), "optimizer.clip_norm", None),
        (("lr = 3e-4", 'implementation = "foreach"'), "optimizer.variant", "foreach"),
        (
            (
                "tensor_parallel_degree = 1",
                'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"',
            ),
            "pipeline.schedule",
            "interleaved",
        ),
    ],
)
def test_a_setting_of_torchtitan_becomes_a_field(
    changes: tuple[str, str], path: str, value: object, tmp_path: Path
) -> None:
    text = TITAN.replace(*changes).replace("local_batch_size = 1\n", "local_batch_size = 2\n" if "pipeline" in path else
                                           "local_batch_size = 1\n")  # fmt: skip
    found: object = torchtitan(tmp_path, text).scenario.strategies[0]
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    "changes, expected",
    [
        (('flavor = "8B"', 'flavor = "9B"'), "llama3 9B is no preset: give --model"),
        (("tensor_parallel_degree = 1", "tensor_parallel_degree = 3"), "is not 8 GPUs"),
        (('mode = "selective"', 'mode = "some"'), "some: one of none, full, selective is expected"),
        (("lr = 3e-4", "lr = "), "not TOML"),
    ],
)
def test_wrong_jobs_of_torchtitan_are_told(changes: tuple[str, str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ImportProblems) as raised:
        torchtitan(tmp_path, TITAN.replace(*changes))
    assert expected in str(raised.value)


def test_torchtitans_tensor_and_context_parallelism_are_taken_over(tmp_path: Path) -> None:
    text = TITAN.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2\ncontext_parallel_degree = 2")
    found = torchtitan(tmp_path, text)
    setup = found.scenario.strategies[0]
    assert (setup.tensor.degree, setup.tensor.sequence_parallel, setup.context.degree) == (2, True, 2)
    assert setup.fsdp is not None and setup.fsdp.degree == 4 and setup.data_parallel == 2
    assert not [entry for entry in found.account.not_expressible if "parallel_degree" in entry.name]


@pytest.mark.parametrize(("compiled", "asynchronous"), [("enable = true", True), ("enable = false", False)])
def test_torchtitans_asynchronous_tensor_parallelism_is_taken_over_where_blocks_are_compiled(
    compiled: str, asynchronous: bool, tmp_path: Path
) -> None:
    text = TITAN.replace(
        "tensor_parallel_degree = 1", "tensor_parallel_degree = 2\nenable_async_tensor_parallel = true"
    )
    found = torchtitan(tmp_path, f"{text}\n[compile]\n{compiled}\n")
    assert found.scenario.strategies[0].tensor.asynchronous is asynchronous
    assert not [entry for entry in found.account.not_expressible if "async" in entry.name]


def test_torchtitans_context_parallelism_goes_over_stages(tmp_path: Path) -> None:
    sizes = "pipeline_parallel_degree = 2\ncontext_parallel_degree = 2"
    text = TITAN.replace("tensor_parallel_degree = 1", f"tensor_parallel_degree = 1\n{sizes}")
    text = text.replace("local_batch_size = 1\n", "local_batch_size = 2\n")
    setup = torchtitan(tmp_path, text).scenario.strategies[0]
    assert setup.pipeline is not None and setup.fsdp is not None
    assert (setup.context.degree, setup.pipeline.degree, setup.fsdp.degree, setup.data_parallel) == (2, 2, 4, 2)


def test_replicas_are_distributed_data_parallel(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\n"
    setup = accelerate(tmp_path, text).scenario.strategies[0]
    assert setup.ddp is not None and setup.ddp.degree == 4


def test_zero_2_by_accelerates_fields(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nmixed_precision: bf16\nnum_processes: 4\n"
    setup = accelerate(tmp_path, text).scenario.strategies[0]
    assert setup.zero is not None and (setup.zero.degree, setup.zero.stage) == (4, 2)
    assert (setup.precision.parameters, setup.precision.reduce) == ("bf16", "bf16")
