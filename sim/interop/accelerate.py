"""accelerate's configuration as a scenario: FSDP, DeepSpeed by fields, replicas, one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.interop.cluster import put_cluster
from sim.interop.deepspeed import put_sharding
from sim.interop.draft import Draft, Imported
from sim.interop.files import flat, read_yaml
from sim.interop.given import Raw
from sim.interop.options import Options
from sim.interop.script import needs, put_script
from sim.interop.table import load_table

FSDP = "fsdp_config.fsdp_"
ZERO = "deepspeed_config."
SIZES = "parallelism_config.parallelism_config_"
KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")


def import_accelerate(path: Path, text: str, options: Options) -> Imported:
    """A scenario from a YAML that `accelerate config` writes. Raises ImportProblems."""
    raws = [Raw(".".join(place), value, line) for place, value, line in flat(read_yaml(text, str(path)))]
    empty: tuple[Any, ...] = ("", "none", "None", [])
    draft = Draft(
        path, load_table("accelerate"), options, [r for r in raws if r.value is not None and r.value not in empty]
    )
    needs(draft, "model", "seq_len")
    put_script(draft)
    gpus = _put_cluster(draft)
    kind = str(draft.get("distributed_type")).upper()
    if kind == "FSDP":
        _put_fsdp(draft, gpus)
    elif kind == "DEEPSPEED":
        _put_deepspeed(draft, gpus)
    elif kind in ("NO", "MULTI_GPU"):
        names = ("distributed_type", "distributed_type", "distributed_type")
        put_sharding(draft, gpus, 0, "none", "none", names)
    elif kind == "MEGATRON_LM":
        draft.problem("distributed_type", "Megatron's arguments: import the launch script with `sim import megatron`")
    else:
        draft.problem("distributed_type", f"{kind}: one of {', '.join(KINDS)} is expected")
    draft.use("distributed_type", f"{gpus} GPU{'s' * (gpus > 1)}")
    _put_batch(draft)
    _put_precision(draft, kind)
    draft.direct()
    return draft.finish(path.stem)


def _put_cluster(draft: Draft) -> int:
    """num_processes counts the GPUs of all machines."""
    total, machines = draft.get("num_processes"), draft.get("num_machines")
    one_gpu = str(draft.get("distributed_type")).upper() == "NO"
    if draft.override("cluster.gpus_per_node") is None and (total is not None or one_gpu):
        total = total or 1
        nodes = draft.override("cluster.nodes") or machines or 1
        per_node, rest = divmod(total, nodes) if type(nodes) is int and nodes > 0 else (total, 0)
        if rest or per_node < 1:
            draft.problem("num_processes", f"{total} processes on {nodes} machines: a multiple is expected")
            return 1
        draft.put("cluster.gpus_per_node", per_node, "num_processes")
        return put_cluster(draft, "num_machines", None, per_node)
    draft.use("num_processes", "not used: --gpus-per-node says it")
    return put_cluster(draft, "num_machines", None)


def _put_fsdp(draft: Draft, gpus: int) -> None:
    """FSDP of either version."""
    version = draft.get(FSDP + "version")
    facts = draft.table.facts["strategies"]
    strategy = str(draft.get(FSDP + "sharding_strategy") or "FULL_SHARD").upper()
    strategy = facts.get(strategy, strategy)
    reshard = draft.get(FSDP + "reshard_after_forward")
    if isinstance(reshard, str) and reshard.upper() in facts.values():
        strategy, reshard = reshard.upper(), None  # version 1 takes a strategy there
    if strategy not in facts.values():
        draft.problem(FSDP + "sharding_strategy", f"{strategy}: one of {', '.join(facts.values())} is expected")
        return
    name = FSDP + ("sharding_strategy" if draft.has(FSDP + "sharding_strategy") else "reshard_after_forward")
    if gpus > 1 and version == 1:
        _put_fsdp1(draft, gpus, strategy, name)
    elif gpus > 1:
        _put_degrees(draft, "parallel.fsdp", gpus, strategy, name)
        keeps = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") or str(reshard).lower() == "false"
        draft.put("parallel.fsdp.reshard_after_forward", not keeps, name)
        draft.put("parallel.fsdp.cpu_offload", draft.get(FSDP + "offload_params"), FSDP + "offload_params")
        for field in ("forward_prefetch", "backward_prefetch", "use_orig_params", "limit_all_gathers"):
            draft.use(FSDP + field, "FSDP1's: FSDP2 has no such setting")
    said = "one GPU has nobody to share with" if gpus == 1 else f"{strategy}, FSDP{version}"
    for field in FSDP_FIELDS:
        draft.use(FSDP + field, said)
    _put_fsdp_details(draft)


FSDP_FIELDS = ("version", "sharding_strategy", "reshard_after_forward", "forward_prefetch", "backward_prefetch",
               "use_orig_params", "limit_all_gathers", "offload_params")  # fmt: skip
STRATEGIES = {"FULL_SHARD": "full_shard", "HYBRID_SHARD": "full_shard", "SHARD_GRAD_OP": "shard_grad_op",
              "HYBRID_SHARD_ZERO2": "shard_grad_op", "NO_SHARD": "no_shard"}  # fmt: skip
"""Hybrid strategies have replicas beside."""


def _put_fsdp1(draft: Draft, gpus: int, strategy: str, name: str) -> None:
    """The section `parallel.fsdp1`, which names its settings as torch does."""
    path = "parallel.fsdp1."
    _put_degrees(draft, "parallel.fsdp1", gpus, strategy, name)
    draft.put(path + "strategy", STRATEGIES[strategy], name)
    for field in ("use_orig_params", "limit_all_gathers", "forward_prefetch"):
        draft.put(path + field, draft.get(FSDP + field), FSDP + field)
    prefetch = str(draft.get(FSDP + "backward_prefetch")).upper()
    values = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": None}
    if prefetch not in values:
        draft.problem(FSDP + "backward_prefetch", f"{prefetch}: one of {', '.join(values)} is expected")
        return
    draft.put(path + "backward_prefetch", values[prefetch], FSDP + "backward_prefetch")
    if draft.get(FSDP + "offload_params"):
        draft.cannot(FSDP + "offload_params", "CPU offload of FSDP1")


def _put_degrees(draft: Draft, path: str, gpus: int, strategy: str, name: str) -> None:
    """Ranks that share the parameters; hybrid strategies shard within a node."""
    replicas = draft.get(SIZES + "dp_replicate_size") or 1
    names = [name]
    if draft.has(SIZES + "dp_replicate_size") or draft.has(SIZES + "dp_shard_size"):
        names = [SIZES + "dp_shard_size", SIZES + "dp_replicate_size"]
        shard = draft.get(SIZES + "dp_shard_size") or 1
        if replicas * shard != gpus:
            draft.problem(names[0], f"shard {shard} x replicate {replicas} is not {gpus} GPUs")
            return
    elif strategy.startswith("HYBRID"):
        per_node = (
            draft.override("cluster.gpus_per_node") or draft.document.data["cluster"].get("gpus_per_node") or gpus
        )
        replicas = max(1, gpus // per_node)
    draft.put(f"{path}.degree", gpus // replicas, *names)
    if replicas > 1:
        draft.put(f"{path}.replicas", replicas, *names)


def _put_fsdp_details(draft: Draft) -> None:
    """Wrapping and checkpointing."""
    wrap = str(draft.get(FSDP + "auto_wrap_policy")).upper()
    if wrap == "TRANSFORMER_BASED_WRAP":
        draft.use(FSDP + "auto_wrap_policy", "every block is a unit")
    else:
        draft.cannot(FSDP + "auto_wrap_policy", f"{wrap}: every block is wrapped instead")
    if draft.get(FSDP + "activation_checkpointing"):
        draft.put("checkpoint.every", 1, FSDP + "activation_checkpointing")
        if draft.get(FSDP + "activation_checkpointing_offload"):
            draft.put("offload.what", "checkpoint_inputs", FSDP + "activation_checkpointing_offload")
    for field in ("activation_checkpointing", "activation_checkpointing_offload"):
        draft.use(FSDP + field, "off")


def _put_deepspeed(draft: Draft, gpus: int) -> None:
    if draft.has(ZERO + "deepspeed_config_file"):
        file = draft.get(ZERO + "deepspeed_config_file")
        message = f"the settings are in {file}: `sim import deepspeed {file}`"
        draft.problem(ZERO + "deepspeed_config_file", message)
        return
    names = (ZERO + "zero_stage", ZERO + "offload_optimizer_device", ZERO + "offload_param_device")
    stage, optimizer, parameters = (draft.get(name) for name in names)
    stage = stage if type(stage) is int else 0
    put_sharding(draft, gpus, stage, str(optimizer).lower(), str(parameters).lower(), names)


def _put_batch(draft: Draft) -> None:
    draft.put("batch.micro_batch", 1, note="the training script's: give --micro-batch")
    name = "gradient_accumulation_steps"
    name = ZERO + name if draft.has(ZERO + name) else name
    if draft.has(name):
        draft.put("batch.accumulation", draft.get(name), name)
    clip = ZERO + "gradient_clipping" if draft.has(ZERO + "gradient_clipping") else "gradient_clipping"
    if draft.has(clip):
        draft.put("optimizer.clip_norm", draft.get(clip) or None, clip)
    else:
        draft.put("optimizer.clip_norm", 1.0, note="max_grad_norm of transformers' Trainer")


def _put_precision(draft: Draft, kind: str) -> None:
    """fp32 parameters; FSDP and DeepSpeed also reduce in the dtype of mixed_precision."""
    named = str(draft.get("mixed_precision")).lower()
    if named == "fp8":
        draft.cannot("mixed_precision", "products in fp8: bf16 is played")
        named = "bf16"
    if named not in ("no", "false", "bf16", "fp16"):
        draft.problem("mixed_precision", f"{named}: no, fp16, bf16 or fp8 is expected")
        return
    compute = named if named in ("bf16", "fp16") else "fp32"
    if "zero" in draft.document.data.get("parallel", {}):
        draft.put("precision.parameters", compute, "mixed_precision", note="beside fp32 main parameters")
    else:
        draft.put("precision.parameters", "fp32", note="accelerate keeps parameters in fp32")
    draft.put("precision.compute", compute, "mixed_precision")
    if kind in ("FSDP", "DEEPSPEED"):
        draft.put("precision.reduce", compute, "mixed_precision")
