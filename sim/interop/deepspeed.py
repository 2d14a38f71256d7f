"""DeepSpeed's JSON as a scenario. The model, the sequence length and the GPUs are not in it: options say them."""

from __future__ import annotations

from pathlib import Path

from sim.interop.cluster import put_cluster
from sim.interop.draft import Draft, Imported
from sim.interop.files import flat, read_json
from sim.interop.given import Raw
from sim.interop.options import Options
from sim.interop.script import needs, put_script
from sim.interop.table import load_table

ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
CPU, NVME = "cpu", "nvme"
KEPT = ("none", "false")


def import_deepspeed(path: Path, text: str, options: Options) -> Imported:
    """A scenario from a DeepSpeed JSON. Raises ImportProblems."""
    table = load_table("deepspeed")
    values = [Raw(".".join(place), value, line) for place, value, line in flat(read_json(text, str(path)))]
    draft = Draft(path, table, options, [raw for raw in values if raw.value != "auto"])
    auto = {raw.name for raw in values if raw.value == "auto"}
    needs(draft, "model", "seq_len")
    put_script(draft)
    gpus = put_cluster(draft, None, None)
    given = draft.get("zero_optimization.stage")
    stage = given if type(given) is int else 0
    sharing = _put_sequences(draft, gpus, stage)
    _put_batch(draft, gpus // sharing)
    put_sharding(draft, gpus, stage, _device(draft, "optimizer"), _device(draft, "param"), NAMES, sharing)
    _put_precision(draft)
    kind = str(draft.get("optimizer.type")).lower()
    if kind == "sgd":
        draft.put("optimizer.name", "sgd", "optimizer.type")
    elif kind not in ADAMS:
        draft.cannot("optimizer.type", "another optimizer than Adam")
    draft.use("optimizer.type", "optimizer.name: adamw")
    if "gradient_clipping" in auto:
        usual = table.facts["auto"]["gradient_clipping"]
        draft.put("optimizer.clip_norm", usual, note='gradient_clipping "auto": max_grad_norm of transformers')
    else:
        draft.put("optimizer.clip_norm", draft.get("gradient_clipping") or None, "gradient_clipping")
    for name in sorted(auto - {"gradient_clipping"}):
        if (field := table.find(name)) is not None and field.kind != "ignored":
            draft.assume(f"{name} auto", "filled by the training script: the default is taken, or what an option says")
    draft.direct()
    return draft.finish(path.stem)


NAMES = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
)


def _put_sequences(draft: Draft, gpus: int, stage: int) -> int:
    """Ranks that share every sequence by Ulysses, which is played under ZeRO."""
    name = "sequence_parallel_size"
    ranks = draft.get(name)
    if ranks < 1 or gpus % ranks:
        draft.problem(name, f"{ranks} ranks for a sequence do not divide {gpus} GPUs")
    elif ranks > 1 and stage < 1:
        draft.cannot(name, "Ulysses without a ZeRO stage: every rank has sequences of its own")
    elif ranks > 1:
        draft.put("parallel.context.degree", ranks, name)
        return int(ranks)
    draft.use(name, "every rank has sequences of its own")
    return 1


def _device(draft: Draft, what: str) -> str:
    """Where optimizer states or parameters live; older files say it by a switch."""
    old = {"optimizer": "zero_optimization.cpu_offload", "param": "zero_optimization.cpu_offload_params"}[what]
    if draft.get(old) is True:
        draft.use(old, f"{what} on the CPU")
        return CPU
    draft.use(old, f"no {what} on the CPU")
    return str(draft.get(f"zero_optimization.offload_{what}.device")).lower()


def put_sharding(
    draft: Draft, gpus: int, stage: int, optimizer: str, parameters: str, names: tuple[str, str, str], sharing: int = 1
) -> None:
    """The section `parallel` for a ZeRO stage; `optimizer` and `parameters` are where they live (none, cpu, nvme); `sharing`
    ranks have a sequence together."""
    stage_name, optimizer_name, parameter_name = names
    if not 0 <= stage <= 3:
        draft.problem(stage_name, f"{stage}: a stage from 0 to 3 is expected")
        return
    leaves = stage > 0 and optimizer in (CPU, NVME)
    if gpus == 1 and not leaves:
        draft.use(stage_name, "one GPU has nobody to share with")
    elif stage == 0:
        draft.put("parallel.ddp.degree", gpus, stage_name, note="replicas are played as DistributedDataParallel")
    else:
        draft.put("parallel.zero.degree", gpus // sharing, stage_name)
        draft.put("parallel.zero.stage", stage, stage_name)
        _put_details(draft, stage)
    _put_optimizer_device(draft, stage, optimizer, optimizer_name)
    _put_parameter_device(draft, stage, parameters, leaves, parameter_name)


def _put_optimizer_device(draft: Draft, stage: int, device: str, name: str) -> None:
    """Where optimizer states live. Below stage 3 DeepSpeed keeps those "on NVMe" in main memory."""
    if device in KEPT:
        draft.use(name, "stays on the GPU")
    elif device not in (CPU, NVME):
        draft.problem(name, f"{device}: none, cpu or nvme is expected")
    elif not stage:
        draft.cannot(name, f"optimizer states on {device.upper()} without a ZeRO stage")
    else:
        draft.put("parallel.zero.offload_optimizer", device if stage == 3 else CPU, name)
        if device == NVME and stage == 3:
            for field in ("pipeline_read", "pipeline_write"):
                full = f"zero_optimization.offload_optimizer.{field}"
                if full in draft.table.fields and draft.has(full):
                    draft.put(f"parallel.zero.{field}", draft.get(full), full)


def _put_parameter_device(draft: Draft, stage: int, device: str, optimizer_leaves: bool, name: str) -> None:
    """Where 16-bit parameters live."""
    if device in KEPT:
        draft.use(name, "stays on the GPU")
    elif device not in (CPU, NVME):
        draft.problem(name, f"{device}: none, cpu or nvme is expected")
    elif stage != 3 or not optimizer_leaves:
        draft.cannot(name, f"parameters on {device.upper()} without stage 3 and offload_optimizer")
    else:
        draft.put("parallel.zero.offload_param", device, name)


SHARED = {"reduce_bucket_size": "reduce_bucket_size", "overlap_comm": "overlap_comm"}
STAGE_3_NAMES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
"""Fields of `parallel.zero`, and DeepSpeed's names of them."""


def _put_details(draft: Draft, stage: int) -> None:
    """Sizes of buckets and the like, where the file gives them."""
    for field, name in (SHARED | (STAGE_3_NAMES if stage == 3 else {})).items():
        full = f"zero_optimization.{name}"
        if full in draft.table.fields and draft.has(full) and (value := draft.get(full)) is not None:
            draft.put(f"parallel.zero.{field}", int(value) if type(value) is float else value, full)


def _put_batch(draft: Draft, gpus: int) -> None:
    """train_batch_size = micro-batch x accumulation x GPUs: DeepSpeed finds the third from two of them."""
    total, micro = draft.get("train_batch_size"), draft.get("train_micro_batch_size_per_gpu")
    steps = draft.get("gradient_accumulation_steps") if draft.has("gradient_accumulation_steps") else None
    micro = draft.override("batch.micro_batch") or micro
    for name, value in (("train_batch_size", total), ("gradient_accumulation_steps", steps)):
        if value is not None and value < 1:
            draft.problem(name, f"{value}: a number above 0 is expected")
            return
    if micro is None and total is not None:
        micro, rest = divmod(total, gpus * (steps or 1))
        if rest or not micro:
            draft.problem("train_batch_size", f"{total} is no multiple of {gpus} GPUs x {steps or 1} micro-batches")
            return
        draft.put("batch.micro_batch", micro, "train_batch_size", note=f"over {gpus} GPUs x {steps or 1}")
    elif draft.has("train_micro_batch_size_per_gpu"):
        draft.put("batch.micro_batch", draft.get("train_micro_batch_size_per_gpu"), "train_micro_batch_size_per_gpu")
    elif micro is None:
        draft.put("batch.micro_batch", 1, note="the file does not say (--micro-batch)")
        micro = 1
    if steps is not None:
        draft.put("batch.accumulation", steps, "gradient_accumulation_steps")
        if total is not None and type(micro) is int and total != micro * steps * gpus:
            draft.problem("train_batch_size", f"{total} is not {micro} x {steps} micro-batches x {gpus} GPUs")
        draft.use("train_batch_size", "agrees with micro-batch and accumulation")
    elif total is not None and type(micro) is int and micro > 0:
        steps, rest = divmod(total, micro * gpus)
        if rest or not steps:
            draft.problem("train_batch_size", f"{total} is no multiple of micro-batch {micro} x {gpus} GPUs")
            return
        draft.put("batch.accumulation", steps, "train_batch_size", note=f"over {gpus} GPUs x {micro}")


def _put_precision(draft: Draft) -> None:
    """16-bit parameters with fp32 main ones, reduced in 16 bit unless told otherwise."""
    bf16, fp16 = draft.get("bf16.enabled") is True, draft.get("fp16.enabled") is True
    if bf16 and fp16:
        draft.problem("fp16.enabled", "bf16 is enabled too")
        return
    source = "bf16.enabled" if bf16 else "fp16.enabled"
    compute = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if "zero" in draft.document.data.get("parallel", {}):
        draft.put("precision.parameters", compute, source, note="beside fp32 main parameters")
    else:
        note = "main parameters stand for both copies" if bf16 or fp16 else ""
        draft.put("precision.parameters", "fp32", source, note=note)
    draft.put("precision.compute", compute, source)
    said = str(draft.get("communication_data_type") or compute).lower()
    reduce = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}.get(said)
    if reduce is None:
        draft.problem("communication_data_type", f"{said}: fp32, fp16 or bfp16 is expected")
        return
    draft.put("precision.reduce", reduce, "communication_data_type", note=f"as computed: {compute}")
    for name in ("bf16.enabled", "fp16.enabled"):
        draft.use(name, f"precision.compute: {compute}")
