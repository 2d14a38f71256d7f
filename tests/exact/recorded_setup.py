"""From a recording's meta (its complete configuration) to the Setup that imitates it."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from sim.hardware.catalogue import find_gpu, make_cluster
from sim.hardware.mesh import Mesh
from sim.model.catalogue import IMPLEMENTATIONS
from sim.model.config import Family, Implementation, Lora, ModelConfig
from sim.model.encoders import ENCODERS, OWN_FIELDS
from sim.model.experts import Experts
from sim.model.shard.context import ContextKind, ContextParallel
from sim.scenario.parallel import Ddp, Fsdp, Fsdp1, Zero
from sim.scenario.setup import Batch, Checkpoint, Host, Offload, Optimizer, Precision, Region, Setup

FAMILIES: dict[str, Family] = {"gpt2": "gpt", "megatron": "gpt", "bert": "bert", "vit": "vit", "t5": "t5"}
"""By transformers' model type; all others are Llama-like."""
TITAN_SELECTIVE = ("attention", "every_second_matmul")


def llama_setup(meta: dict[str, Any]) -> Setup:
    """Recordings of the fsdp/ kind: Llama (or GPT, `model`) on one GPU or under FSDP2."""
    bf16, mixed = meta["prec"] == "bf16", meta["prec"] == "mp"
    parameters = "bf16" if bf16 else "fp32"
    precision = Precision(
        parameters=parameters,
        compute="bf16" if meta["prec"] != "fp32" else "fp32",
        reduce="bf16" if (bf16 and not meta.get("fp32red")) or meta.get("bfred") else "fp32",
        autocast=meta["prec"] == "autocast",
        float8=meta.get("float8"),
    )
    return _setup(
        meta,
        model=_block_gpt(meta) if meta.get("model") == "gpt" else _llama(meta),
        batch=Batch(micro_batch=meta["B"], seq_len=meta["seq"], accumulation=meta["accum"]),
        precision=precision,
        checkpoint=_checkpoint(meta),
        fsdp=_fsdp(meta, mixed) if meta["world"] and "family" not in meta else None,
        zero_grad=meta["zero"],
        offload=_offload(meta),
        **_families(meta),
    )


def _families(meta: dict[str, Any]) -> dict[str, Any]:
    """Sharding families other than FSDP2."""
    if meta.get("family") == "ddp":
        cap = meta["cap"]
        ddp = Ddp(
            degree=meta["world"], bucket_cap=cap and cap << 20, gradient_as_bucket_view=meta["view"],
            gradient_sync="every" if meta["sync_all"] else "last", static_graph=meta.get("static", False),
        )  # fmt: skip
        return {"ddp": ddp}
    if meta.get("family") == "fsdp1":
        replicas, degree = meta.get("hsdp") or (1, meta["world"])
        fsdp1 = Fsdp1(
            degree=degree, replicas=replicas, strategy=STRATEGIES[meta["strategy"]], use_orig_params=meta["orig"],
            limit_all_gathers=meta["limit"], backward_prefetch=meta["bp"], forward_prefetch=meta["fp"],
            wrap="checkpoint(fsdp)" if meta.get("wrap_outside") else "fsdp(checkpoint)",
            gradient_sync="every" if meta["sync_all"] else "last", cast_forward_inputs=meta["cast_inputs"],
        )  # fmt: skip
        return {"fsdp1": fsdp1}
    if meta.get("family") == "zero":
        given = meta.get("zero_cfg", {})
        names = {name: given[key] for name, key in ZERO_FIELDS.items() if key in given}
        names |= {name: given[name]["device"] for name in ("offload_optimizer", "offload_param") if name in given}
        return {"zero": Zero(degree=meta["world"], stage=meta["stage"], **names)}
    return {}


ZERO_FIELDS = {
    "reduce_bucket": "reduce_bucket_size", "overlap_comm": "overlap_comm", "max_live": "stage3_max_live_parameters",
    "prefetch_bucket": "stage3_prefetch_bucket_size", "max_reuse_distance": "stage3_max_reuse_distance",
    "persistence_threshold": "stage3_param_persistence_threshold", "sub_group": "sub_group_size",
}  # fmt: skip
STRATEGIES: Any = {
    "FULL_SHARD": "full_shard", "HYBRID_SHARD": "full_shard", "SHARD_GRAD_OP": "shard_grad_op",
    "_HYBRID_SHARD_ZERO2": "shard_grad_op", "NO_SHARD": "no_shard",
}  # fmt: skip


def _offload(meta: dict[str, Any]) -> Offload | None:
    """save_on_cpu around the whole forward, or around every block's call; activations on side streams."""
    if "streamed" in meta:
        last = meta["L"] - (meta["streamed"] == "all_but_last")
        ahead, smallest = meta.get("ahead", 1), 1024
        return Offload(
            what="activations", layers=tuple(range(last)), streams="side", look_ahead=ahead, above_bytes=smallest,
            release=meta.get("release", "record_stream"),
        )  # fmt: skip
    if meta["ac"] == "offload":
        return Offload(what="saved_tensors")
    if meta["ac"] == "full_offload" or meta.get("block_offload"):
        return Offload(what="saved_tensors", layers=tuple(range(meta["L"])))
    return None


def _llama(meta: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        name="recorded", family="llama", implementation="torchtitan",
        layers=meta["L"], hidden=meta["h"], ffn_hidden=meta["ffn"], heads=meta["heads"], kv_heads=meta["kv"],
        head_dim=meta.get("hd") or meta["h"] // meta["heads"], vocab=meta["V"], max_positions=meta["seq"],
        norm="fused" if meta["norm"] == "fused" else "manual",
        rope="complex" if meta["rope"] == "complex" else "cos_sin",
        gqa=meta["gqa"], logits=_logits(meta), keep_logits=not meta["del_logits"],
        tied_embeddings=meta.get("tie", False),
        qkv_bias=meta.get("qkv_bias", False), qk_norm=meta.get("qk_norm", False),
        frozen=_frozen(meta), loss_chunks=meta.get("chunks", 1), loss_chunking=meta.get("chunking", "backward"),
        lora=_lora(meta), input_gradients=meta.get("inputs_grad", False),
    )  # fmt: skip


def _context(meta: dict[str, Any]) -> ContextParallel:
    """torch's context_parallel around forward and backward; its ranks are among those of `world`."""
    kind: ContextKind = "all-gather" if meta.get("rotate") == "all-gather" else "ring"
    return ContextParallel(meta.get("cp", 1), kind)


def _lora(meta: dict[str, Any]) -> Lora | None:
    """Recordings with adapters name them as `Lora` does."""
    named = meta.get("lora")
    sharded = bool(meta.get("world")) and named is not None and "base" in named
    return None if named is None else Lora(**_tuples(named), sharded=sharded)


def _block_gpt(meta: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        name="recorded", family="gpt", implementation="nanogpt",
        layers=meta["L"], hidden=meta["h"], ffn_hidden=meta["ffn"], heads=meta["heads"], kv_heads=meta["heads"],
        head_dim=meta["h"] // meta["heads"], vocab=meta["V"], max_positions=meta["seq"],
        tied_embeddings=meta.get("tie", False), bias=meta.get("bias", True), dropout=meta.get("drop", 0.0),
        activation="gelu_tanh", norm="layer_norm", rope="none",
        logits=_logits(meta), keep_logits=not meta["del_logits"],
        frozen=_frozen(meta), loss_chunks=meta.get("chunks", 1), loss_chunking=meta.get("chunking", "backward"),
    )  # fmt: skip


def _logits(meta: dict[str, Any]) -> Any:
    return {"float": "loss_upcast", "bf16": "keep_dtype", "model_float": "model_upcast"}[meta["loss"]]


def _frozen(meta: dict[str, Any]) -> tuple[str, ...]:
    """Recordings name frozen parameters by regular expressions that are shell patterns in disguise."""
    return tuple(pattern.replace(".*", "*").replace("\\.", ".") for pattern in meta.get("frozen", ()))


def _checkpoint(meta: dict[str, Any]) -> Checkpoint | None:
    kind = meta["ac"]
    if kind in ("none", "offload"):
        return None
    if kind == "reentrant":
        return Checkpoint(reentrant=True)
    if kind == "form":
        return form(meta["form"])
    save = tuple(meta.get("save") or TITAN_SELECTIVE) if kind == "op" else ()
    return Checkpoint(
        every=int(kind.removeprefix("layer")) if kind.startswith("layer") else 1,
        segment=int(kind.removeprefix("seg")) if kind.startswith("seg") else 1,
        first=meta.get("first"),
        save=save,
        early_stop=meta.get("early_stop", True),
    )


def form(named: dict[str, Any]) -> Checkpoint:
    """Recordings of checkpoint forms name them as `Checkpoint` does."""
    choices = [None if choice is None else Region(**_tuples(choice)) for choice in named.get("layers", ())]
    return Checkpoint(**_tuples({**named, "layers": choices}))


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _fsdp(meta: dict[str, Any], mixed: bool) -> Fsdp:
    raf = meta["raf"]
    titan_2026 = meta["layout"] == "titan26"
    replicas, degree = meta["hsdp"] if meta.get("hsdp") else (1, meta["world"])
    return Fsdp(
        degree=degree,
        replicas=replicas,
        reshard_after_forward="torchtitan" if raf == "titan" else True if raf is None else raf,
        root_reshard_after_forward=None if raf == "titan" or titan_2026 else raf,
        units="torchtitan_2026" if titan_2026 else "blocks",
        wrap="checkpoint(fsdp)" if meta.get("wrap_outside") else "fsdp(checkpoint)",
        forward_prefetch=meta.get("fwd_prefetch") or 0,
        backward_prefetch=meta.get("bwd_prefetch"),
        reduce_scatter_buffers=meta.get("rs_buffers", 1),
        gradient_sync="every" if meta["sync_all"] else "last",
        cast_forward_inputs=meta["cast_inputs"],
        cpu_offload=meta["cpu_offload"],
    )


def gpt_setup(meta: dict[str, Any]) -> Setup:
    """Recordings train_*: a GPT on one GPU."""
    model = ModelConfig(
        name="recorded", family="gpt", implementation="nanogpt",
        layers=meta["L"], hidden=meta["d"], ffn_hidden=meta["ff"], heads=meta["h"], kv_heads=meta["h"],
        head_dim=meta["d"] // meta["h"], vocab=meta["V"], max_positions=meta["T"],
        tied_embeddings=meta.get("tie", True), bias=meta.get("bias", True), dropout=meta["drop"],
        activation="gelu_tanh", norm="layer_norm", rope="none",
        attention="math" if meta.get("math_sdp") else "sdpa", logits="keep_dtype",
    )  # fmt: skip
    amp, fp32 = meta["amp"], meta["dtype"] == "fp32"
    return _setup(
        meta,
        model=model,
        batch=Batch(micro_batch=meta["B"], seq_len=meta["T"], accumulation=meta.get("accum", 1), tokens="per_step"),
        precision=Precision(
            parameters="fp32" if amp or fp32 else "bf16", compute="bf16" if amp or not fp32 else "fp32", autocast=amp
        ),
        checkpoint=Checkpoint() if meta["ckpt"] else None,
        fsdp=None,
        zero_grad="end",
        offload=None,
    )


def _setup(
    meta: dict[str, Any], *, model: ModelConfig, batch: Batch, precision: Precision, checkpoint: Checkpoint | None,
    fsdp: Fsdp | None, zero_grad: Any, offload: Any, **families: Any,
) -> Setup:  # fmt: skip
    ranks = meta.get("world") or 1
    capability = meta.get("cc", 90)
    gpu = replace(find_gpu("h100-sxm"), sms=meta.get("sms", 132), compute_capability=divmod(capability, 10))
    per_node = gcd(ranks, 8)
    cluster = make_cluster(gpu, gpus_per_node=per_node, nodes=ranks // per_node)
    variant = {"forloop": "for-loop"}.get(meta["opt"], meta["opt"])
    return Setup(
        name="recorded", torch=meta["torch"].split("+")[0], model=model, cluster=cluster,
        mesh=Mesh((("fsdp", cluster.gpus),), cluster.gpus_per_node, cluster.gpus),
        batch=batch, precision=precision,
        optimizer=Optimizer(
            name=meta.get("optimizer", "adamw"),
            variant=variant,
            momentum=meta.get("momentum", 0.0),
            master_weights=meta.get("master", False),
            in_backward=meta.get("in_backward", False),
            offload=meta.get("host_step"),
            clip_norm=1.0 if meta.get("clip") else None,
            zero_grad=zero_grad,
        ),
        mode=meta.get("mode", "train"),
        checkpoint=checkpoint, fsdp=fsdp, allocator=meta["settings"], host=Host(), profile="h100-sxm", offload=offload,
        context=_context(meta), **families,
    )  # fmt: skip


def implementation_setup(meta: dict[str, Any]) -> Setup:
    """Recordings of transformers' and Megatron's models on one GPU; meta["arch"] is transformers' model type."""
    gpt = meta["arch"] in ("gpt2", "megatron")
    family: Family = FAMILIES.get(meta["arch"], "llama")
    implementation: Implementation = meta["implementation"]
    choices = IMPLEMENTATIONS[family, implementation] | {"tied_embeddings": meta["tie"]}
    choices |= {"keep_logits": meta["keep_logits"]}
    if family in ENCODERS:
        choices |= {"dropout": meta["dropout"], "attention": meta["attention"]}
        choices.pop("max_positions", None)
        if meta.get("gated"):
            choices |= {"activation": "gated_gelu"}
        own = {"image": "image_size", "patch": "patch_size"}
        choices |= {own.get(name, name): meta[name] for name in meta if own.get(name, name) in OWN_FIELDS}
    elif gpt:
        choices |= {"dropout": meta["dropout"]}
    else:
        choices |= {"qkv_bias": meta["arch"].startswith("qwen2"), "qk_norm": meta["arch"].startswith("qwen3")}
    if "experts" in meta:  # named as `Experts` does
        choices |= {"experts": Experts(**meta["experts"])}
    if "liger" in meta:
        choices |= {"liger": tuple(meta["liger"])}
    if implementation == "megatron":
        choices |= {"bias_gelu_fusion": False, "bias_dropout_fusion": False, "persistent_norm": False}
    if meta.get("math"):
        choices |= {"attention": "math"}
    if "act" in meta and family not in ENCODERS:
        choices |= {"activation": meta["act"]}
    model = ModelConfig(
        name="recorded", family=family, implementation=implementation,
        layers=meta["layers"], hidden=meta["hidden"], ffn_hidden=meta["ffn"], heads=meta["heads"],
        kv_heads=meta["heads"] if gpt else meta["kv"],
        head_dim=meta["hidden"] // meta["heads"] if gpt else meta["head_dim"],
        vocab=meta["V"], max_positions=meta["max_positions"], lora=_lora(meta),
        input_gradients=not gpt and bool(meta["ckpt"] or "form" in meta), **choices,
    )  # fmt: skip
    autocast, bf16 = meta["prec"] == "autocast", meta["prec"] == "bf16"
    return _setup(
        meta,
        model=model,
        batch=Batch(
            micro_batch=meta["B"], seq_len=meta["seq"], target_len=meta.get("target", 0), accumulation=meta["accum"]
        ),
        precision=Precision(
            parameters="bf16" if bf16 else "fp32",
            compute="fp32" if meta["prec"] == "fp32" else "bf16",
            autocast=autocast,
        ),
        checkpoint=form(meta["form"])
        if "form" in meta
        else Checkpoint(every=meta["ckpt"], save=tuple(f"aten.{name}" for name in meta.get("save", ())))
        if meta["ckpt"]
        else None,
        fsdp=Fsdp(degree=meta["world"], reshard_after_forward=True) if meta.get("world") else None,
        zero_grad=meta["zero"],
        offload=None,
    )
