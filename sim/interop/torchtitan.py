"""torchtitan's TOML as a scenario. The GPUs are not in it: options say them."""

from __future__ import annotations

from pathlib import Path

from sim.interop.cluster import put_cluster
from sim.interop.draft import Draft, Imported
from sim.interop.files import flat, read_toml
from sim.interop.given import Raw
from sim.interop.options import Options
from sim.interop.table import load_table

RANKS = "parallelism."
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
SELECTIVE = ["attention", "every_second_matmul"]


def import_torchtitan(path: Path, text: str, options: Options) -> Imported:
    """A scenario from a job's TOML. Raises ImportProblems."""
    values = [Raw(".".join(place), value, line) for place, value, line in flat(read_toml(text, str(path)))]
    draft = Draft(path, load_table("torchtitan"), options, values)
    _put_model(draft)
    gpus = put_cluster(draft, None, None)
    data, pipeline = _put_parallel(draft, gpus)
    _put_batch(draft, data, pipeline)
    _put_precision(draft)
    _put_optimizer(draft)
    _put_checkpoint(draft)
    if not draft.has("training.seq_len") and draft.override("batch.seq_len") is None:
        draft.put("batch.seq_len", draft.get("training.seq_len"), "training.seq_len")
    draft.direct()
    return draft.finish(path.stem)


def _put_model(draft: Draft) -> None:
    """Names and flavors that are presets; others must be told."""
    name, flavor = draft.get("model.name"), draft.get("model.flavor")
    preset = draft.table.facts["flavors"].get(str(name), {}).get(str(flavor))
    if draft.override("model.preset") or draft.override("model.config"):
        for field in ("model.name", "model.flavor"):
            draft.use(field, "not used: --model says it")
    elif preset is None:
        draft.problem("model.flavor", f"{name} {flavor} is no preset: give --model (a preset or a config.json)")
    else:
        draft.put("model.preset", preset, "model.name", "model.flavor")
    draft.put("model.implementation", "torchtitan", note="the job is torchtitan's")


def _degree(draft: Draft, name: str) -> int:
    degree = draft.get(RANKS + name)
    if type(degree) is int and degree >= 1:
        return degree
    if degree is not None:
        draft.problem(RANKS + name, f"{degree}: a number of ranks is expected")
    return 1


def _put_parallel(draft: Draft, gpus: int) -> tuple[int, int]:
    """The section `parallel`; ranks with different data, and pipeline ranks."""
    pipeline = _degree(draft, "pipeline_parallel_degree")
    tensor, context = _degree(draft, "tensor_parallel_degree"), _degree(draft, "context_parallel_degree")
    if tensor > 1:
        draft.put("parallel.tensor.degree", tensor, RANKS + "tensor_parallel_degree")
        draft.put("parallel.tensor.sequence_parallel", True, note="its plan shares tokens between layers")
        if draft.get(RANKS + "enable_async_tensor_parallel") and draft.get("compile.enable"):
            draft.put("parallel.tensor.asynchronous", True, RANKS + "enable_async_tensor_parallel")
        draft.use(RANKS + "enable_async_tensor_parallel", "Inductor's, in compiled blocks")
    if context > 1:
        draft.put("parallel.context.degree", context, RANKS + "context_parallel_degree")
    for name in ("tensor_parallel_degree", "context_parallel_degree", "enable_async_tensor_parallel"):
        draft.use(RANKS + name, "one rank")
    replicas, shard = _degree(draft, "data_parallel_replicate_degree"), draft.get(RANKS + "data_parallel_shard_degree")
    others = tensor * context
    ranks, rest = divmod(gpus, pipeline)
    if type(shard) is not int or shard < 1:
        shard = ranks // (replicas * others)
    if rest or shard < 1 or replicas * shard * others * pipeline != gpus:
        sizes = f"replicate {replicas} x shard {shard} x tensor and context {others} x pipeline {pipeline}"
        draft.problem(RANKS + "data_parallel_shard_degree", f"{sizes} is not {gpus} GPUs")
        return 1, 1
    names = (RANKS + "data_parallel_shard_degree", RANKS + "data_parallel_replicate_degree")
    if shard * others > 1:
        draft.put("parallel.fsdp.degree", shard, names[0])
        if replicas > 1:
            draft.put("parallel.fsdp.replicas", replicas, names[1])
        _put_fsdp(draft)
    elif replicas > 1:
        draft.put("parallel.ddp.degree", replicas, names[1])
    for name in (*names, RANKS + "fsdp_reshard_after_forward", "training.enable_cpu_offload"):
        draft.use(name, "needs FSDP")
    if pipeline > 1:
        _put_pipeline(draft, pipeline)
    for name in ("degree", "schedule", "microbatch_size"):
        draft.use(f"{RANKS}pipeline_parallel_{name}", "one stage")
    return replicas * shard, pipeline


def _put_fsdp(draft: Draft) -> None:
    policy = draft.get(RANKS + "fsdp_reshard_after_forward")
    values = {"default": "torchtitan", "always": True, "never": False}
    if policy not in values:
        draft.problem(RANKS + "fsdp_reshard_after_forward", f"{policy}: one of {', '.join(values)} is expected")
        return
    draft.put("parallel.fsdp.reshard_after_forward", values[policy], RANKS + "fsdp_reshard_after_forward")
    draft.put("parallel.fsdp.cpu_offload", draft.get("training.enable_cpu_offload"), "training.enable_cpu_offload")


def _put_pipeline(draft: Draft, pipeline: int) -> None:
    name = RANKS + "pipeline_parallel_schedule"
    schedules = draft.table.facts["schedules"]
    schedule = schedules.get(str(draft.get(name)).lower())
    if schedule is None:
        draft.problem(name, f"{draft.get(name)}: one of {', '.join(schedules)} is expected")
        return
    draft.put("parallel.pipeline.degree", pipeline, RANKS + "pipeline_parallel_degree")
    draft.put("parallel.pipeline.schedule", schedule, name)
    if draft.has(RANKS + "pipeline_parallel_layers_per_stage"):
        draft.cannot(RANKS + "pipeline_parallel_layers_per_stage", "stages of a given size: equal ones are played")


def _put_batch(draft: Draft, data: int, pipeline: int) -> None:
    """A pipeline cuts the local batch into micro-batches; the global batch counts accumulation steps."""
    local, total = draft.get("training.local_batch_size"), draft.get("training.global_batch_size")
    if draft.override("batch.micro_batch") is not None:
        local = draft.override("batch.micro_batch")
    if type(local) is not int or local < 1:
        draft.problem("training.local_batch_size", f"{local}: a number of sequences is expected")
        return
    micro, steps, names = local, draft.get("training.gradient_accumulation_steps") or 1, ["training.local_batch_size"]
    if pipeline > 1 and draft.override("batch.micro_batch") is None:
        micro = draft.get(RANKS + "pipeline_parallel_microbatch_size") or 1
        names.append(RANKS + "pipeline_parallel_microbatch_size")
        if micro < 1 or local % micro:
            draft.problem(names[1], f"{micro} does not divide the local batch of {local}")
            return
        draft.put("batch.micro_batch", micro, names[1])
    else:
        draft.put("batch.micro_batch", micro, names[0])
    if type(total) is int and total > 0:
        steps, rest = divmod(total, local * data)
        names.append("training.global_batch_size")
        if rest or not steps:
            draft.problem("training.global_batch_size", f"{total} is no multiple of {local} x {data} ranks")
            return
    if draft.has("training.gradient_accumulation_steps"):
        names.append("training.gradient_accumulation_steps")
    draft.put(
        "batch.accumulation",
        steps * (local // micro),
        *names[0 if pipeline > 1 else 1 :],
        note="micro-batches per step",
    )
    draft.use("training.global_batch_size", "one local batch per step")


def _put_precision(draft: Draft) -> None:
    """FSDP's policy; parameters are fp32 unless training.dtype says otherwise."""
    fields = {"parameters": "training.dtype", "compute": "training.mixed_precision_param"}
    for field, name in {**fields, "reduce": "training.mixed_precision_reduce"}.items():
        dtype = DTYPES.get(str(draft.get(name)))
        if dtype is None:
            draft.problem(name, f"{draft.get(name)}: one of {', '.join(DTYPES)} is expected")
        else:
            draft.put(f"precision.{field}", dtype, name)


def _put_optimizer(draft: Draft) -> None:
    if str(draft.get("optimizer.name")).lower() not in ("adam", "adamw"):
        draft.cannot("optimizer.name", "another optimizer than AdamW")
    draft.use("optimizer.name", "optimizer.name: adamw")
    if draft.has("optimizer.fused"):
        draft.put("optimizer.variant", "fused" if draft.get("optimizer.fused") else "foreach", "optimizer.fused")
        draft.use("optimizer.implementation", "not used: optimizer.fused says it")
    else:
        draft.put("optimizer.variant", draft.get("optimizer.implementation"), "optimizer.implementation")
    draft.put("optimizer.zero_grad", "start", note="torchtitan clears gradients at the start of a step")
    if draft.get("optimizer.early_step_in_backward"):
        draft.put("optimizer.in_backward", True, "optimizer.early_step_in_backward")
        draft.put("optimizer.clip_norm", None, "optimizer.early_step_in_backward")
        draft.use("training.max_norm", "gradients are not clipped when steps are in backward")
        return
    draft.use("optimizer.early_step_in_backward", "the optimizer steps after backward")
    draft.put("optimizer.clip_norm", draft.get("training.max_norm") or None, "training.max_norm")


def _put_checkpoint(draft: Draft) -> None:
    """full: every block; selective: every k-th block, or by operators."""
    names = ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option")
    mode, option = draft.get(names[0]), draft.get(names[1])
    if mode == "full":
        draft.put("checkpoint.every", 1, names[0])
    elif mode == "selective" and str(option) == "op":
        draft.put("checkpoint.save", SELECTIVE, *names)
    elif mode == "selective" and str(option).isdigit() and 0 < int(option) < 10_000:
        draft.put("checkpoint.every", int(option), *names)
    elif mode == "selective":
        draft.problem(names[1], f"{option}: op, or a number such as 2, is expected")
    elif mode == "memory_budget":
        draft.cannot(names[0], "recomputation by a budget: nothing is recomputed instead")
    elif mode != "none":
        draft.problem(names[0], f"{mode}: one of none, full, selective is expected")
    for name in names:
        draft.use(name, "nothing is recomputed" if mode == "none" else "not used by this mode")
