"""How Megatron's ranks share the work, and what its layers recompute."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sim.interop.draft import Draft

INSIDE = {"core_attn": "core_attention", "mlp": "mlp"}
DISCARDED = {"layernorm": "norm"}
"""--recompute-modules in the scenario's words; moe_act, moe, mla_up_proj and shared_experts are parts of other layers."""
LONGEST_LAYOUT = 20_000


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks of each kind; `layers` of the model, `stages` (chunks) over all pipeline ranks."""

    tensor: int
    pipeline: int
    data: int
    stages: int
    layers: int


def put_parallel(draft: Draft, gpus: int) -> Degrees:
    """The section `parallel`; degrees of 1 where problems are noted."""
    tensor = _degree(draft, "tensor-model-parallel-size")
    pipeline = _degree(draft, "pipeline-model-parallel-size")
    context = _degree(draft, "context-parallel-size")
    data, rest = divmod(gpus, tensor * pipeline * context)
    if rest or not data:
        sizes = f"tensor {tensor} x pipeline {pipeline}" + (f" x context {context}" if context > 1 else "")
        draft.problem("tensor-model-parallel-size", f"{sizes} does not divide {gpus} GPUs")
        data = 1
    if tensor > 1:
        draft.put("parallel.tensor.degree", tensor, "tensor-model-parallel-size")
        parallel = draft.has("sequence-parallel")
        draft.put("parallel.tensor.sequence_parallel", parallel, "sequence-parallel")
    draft.use("tensor-model-parallel-size", "one rank holds whole layers")
    draft.use("sequence-parallel", "Megatron switches it off without tensor parallelism")
    _put_context(draft, context)
    _put_experts(draft)
    _put_data(draft, data)
    layers = draft.get("num-layers") or 1
    stages = _put_pipeline(draft, pipeline, layers)
    return Degrees(tensor, pipeline, data, stages, layers)


def _degree(draft: Draft, name: str) -> int:
    degree = draft.get(name)
    if type(degree) is int and degree >= 1:
        return degree
    if degree is not None:
        draft.problem(name, f"{degree}: a number of ranks is expected")
    return 1


def _put_context(draft: Draft, degree: int) -> None:
    """Context parallelism, and how its ranks exchange keys and values."""
    if degree > 1:
        draft.put("parallel.context.degree", degree, "context-parallel-size")
        kinds = draft.get("cp-comm-type")
        kind = {"p2p": "ring", "all_gather": "all-gather", "allgather": "all-gather", "a2a": "ulysses"}.get(
            kinds if isinstance(kinds, str) else kinds[0] if len(set(kinds)) == 1 else ""
        )
        if kind is None:
            draft.cannot("cp-comm-type", "another exchange of keys and values: a ring is played")
        draft.put("parallel.context.kind", kind or "ring", "cp-comm-type")
    draft.use("context-parallel-size", "every rank has whole sequences")
    draft.use("cp-comm-type", "no other rank has a part of a sequence")


def _put_experts(draft: Draft) -> None:
    """Expert parallelism; without it every rank of a tensor-parallel group has all experts."""
    degree = _degree(draft, "expert-model-parallel-size")
    if degree > 1:
        draft.put("parallel.expert.degree", degree, "expert-model-parallel-size")
    if draft.has("expert-tensor-parallel-size"):
        if degree == 1:
            draft.put("parallel.expert.degree", 1, "expert-model-parallel-size")
        draft.put("parallel.expert.tensor", draft.get("expert-tensor-parallel-size"), "expert-tensor-parallel-size")
    draft.use("expert-model-parallel-size", "every rank has all experts")


def _put_data(draft: Draft, data: int) -> None:
    """Megatron's own data parallelism, PyTorch's FSDP2, or Megatron's FSDP."""
    if draft.has("use-torch-fsdp2"):
        draft.put("parallel.fsdp.degree", data, "use-torch-fsdp2", note="all ranks that are not tensor-parallel")
        reshard = not draft.has("torch-fsdp2-no-reshard-after-forward")
        draft.put("parallel.fsdp.reshard_after_forward", reshard, "torch-fsdp2-no-reshard-after-forward")
        _put_moments(draft)
        return
    strategy = draft.get("data-parallel-sharding-strategy")
    if draft.has("use-megatron-fsdp"):
        draft.cannot("use-megatron-fsdp", "Megatron's own FSDP: gradients and parameters are played unsharded")
        if strategy in ("optim", "optim_grads", "optim_grads_params"):
            draft.put("parallel.data.distributed_optimizer", True, "data-parallel-sharding-strategy")
    draft.put("parallel.data.degree", data, note="GPUs / (tensor x pipeline x context)")
    draft.use("data-parallel-sharding-strategy", "needs --use-megatron-fsdp")
    if not draft.has("use-megatron-fsdp") or strategy == "no_shard":
        distributed = draft.has("use-distributed-optimizer")
        draft.put("parallel.data.distributed_optimizer", distributed, "use-distributed-optimizer")
    draft.put("parallel.data.overlap", draft.has("overlap-grad-reduce"), "overlap-grad-reduce")
    fused = not draft.has("no-gradient-accumulation-fusion")
    draft.put("parallel.data.gradient_accumulation_fusion", fused, "no-gradient-accumulation-fusion")
    _put_moments(draft)


AWARE = "use-precision-aware-optimizer"


def _put_moments(draft: Draft) -> None:
    """Adam's moments in bf16, as the precision-aware optimizer keeps them; fp16 and fp8 ones are not modelled."""
    names = ("exp-avg-dtype", "exp-avg-sq-dtype")
    if not draft.has(AWARE):
        for name in names:
            draft.use(name, f"needs --{AWARE}")
        return
    dtypes = {str(draft.get(name)) for name in names}
    if dtypes == {"bf16"} and draft.has("use-distributed-optimizer") and not draft.has("use-torch-fsdp2"):
        draft.put("parallel.data.moments", "bf16", AWARE, *names)
        return
    draft.use(AWARE, "main parameters in fp32")
    for name in names:
        if draft.get(name) == "fp32":
            draft.use(name, "moments in fp32")
        else:
            draft.cannot(
                name, "moments are played in fp32: only both in bf16 under a distributed optimizer can be said"
            )


P2P = "no-overlap-p2p-communication"


def _put_pipeline(draft: Draft, pipeline: int, layers: int) -> int:
    """Stages, schedule and layers per stage; the number of stages over all ranks."""
    layout = draft.get("pipeline-model-parallel-layout")
    placement, chunks, names = None, 1, ["pipeline-model-parallel-size"]
    if layout is not None:
        names = ["pipeline-model-parallel-layout"]
        placement = _layout(draft, str(layout))
        chunks, rest = divmod(len(placement), pipeline)
        if rest or not chunks:
            draft.problem(names[0], f"{len(placement)} stages on {pipeline} ranks: a multiple is expected")
            return pipeline
    elif draft.has("num-virtual-stages-per-pipeline-rank"):
        names = ["num-virtual-stages-per-pipeline-rank"]
        chunks = _degree(draft, names[0])
    elif draft.has("num-layers-per-virtual-pipeline-stage"):
        names = ["num-layers-per-virtual-pipeline-stage"]
        size = _degree(draft, names[0])
        chunks, rest = divmod(_counted(draft, layers), pipeline * size)
        if rest or not chunks:
            draft.problem(names[0], f"{layers} layers on {pipeline} ranks do not come in stages of {size}")
            return pipeline
    if pipeline == 1:
        for name in ("pipeline-model-parallel-size", *names, P2P):
            draft.use(name, "one stage")
        return 1
    draft.put("parallel.pipeline.degree", pipeline, "pipeline-model-parallel-size")
    schedule = "interleaved" if chunks > 1 else "1f1b"
    note = "more than one stage per rank" if chunks > 1 else "Megatron's schedule with one stage per rank"
    draft.put("parallel.pipeline.schedule", schedule, *(names if chunks > 1 else []), note=note)
    if chunks > 1:
        draft.put("parallel.pipeline.virtual", chunks, *names)
        draft.put("parallel.pipeline.overlap_p2p", not draft.has(P2P), P2P)
    else:
        draft.use(P2P, "one stage per rank: compute waits for what is sent")
    stages = pipeline * chunks
    placement = placement or _placement(draft, layers, stages)
    if placement is not None:
        given = [name for name in PLACING if draft.has(name)] or ["pipeline-model-parallel-size"]
        draft.put("parallel.pipeline.placement", placement, *(given if layout is None else names))
    return stages


PLACING = (
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
)


def _counted(draft: Draft, layers: int) -> int:
    """Layers as Megatron counts them: embedding and loss may stand for one each."""
    return layers + sum(draft.has(name) for name in PLACING[2:])


def _placement(draft: Draft, layers: int, stages: int) -> list[int] | None:
    """Layers per stage where Megatron does not split them evenly."""
    first = draft.get("decoder-first-pipeline-num-layers")
    last = draft.get("decoder-last-pipeline-num-layers")
    if first is not None or last is not None:
        return _with_ends(draft, layers, stages, first, last)
    size, rest = divmod(_counted(draft, layers), stages)
    if rest:
        message = f"{layers} layers do not come in {stages} equal stages, as Megatron wants them"
        draft.problem("num-layers", message)
        return None
    ends = [draft.has(name) for name in PLACING[2:]]
    if not any(ends):
        return None
    return [size - ends[0], *[size] * (stages - 2), size - ends[1]]


def _with_ends(draft: Draft, layers: int, stages: int, first: int | None, last: int | None) -> list[int] | None:
    """First and last stage as given, the others equal. (With virtual stages Megatron splits the ranks' layers.)"""
    inner = stages - (first is not None) - (last is not None)
    size, rest = (
        divmod(layers - (first or 0) - (last or 0), inner) if inner else (0, layers - (first or 0) - (last or 0))
    )
    if rest or (inner and size < 1) or draft.has("num-virtual-stages-per-pipeline-rank"):
        name = PLACING[0] if first is not None else PLACING[1]
        draft.problem(name, f"{layers} layers do not come in {stages} stages with such ends")
        return None
    middle = [size] * (inner if inner else 0)
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _layout(draft: Draft, text: str) -> list[int]:
    """Transformer layers per stage of "Et*3|(tt|)*4,t|L": E embedding, t layer, m multi-token prediction, L loss."""
    name = "pipeline-model-parallel-layout"
    text = re.sub(r"[,\s]", "", text)
    while (match := re.search(r"\(([^()]*)\)\*(\d+)|([A-Za-z|])\*(\d+)", text)) is not None:
        count = int((match[2] or match[4])[:6])
        text = text[: match.start()] + (match[1] or match[3]) * min(count, LONGEST_LAYOUT) + text[match.end() :]
        if len(text) > LONGEST_LAYOUT:
            break
    if re.search(r"[^EtmL|]", text) or len(text) > LONGEST_LAYOUT:
        draft.problem(name, "E, t, m, L and | are expected, e.g. Et*3|(tt|)*4t|L")
        return [1]
    stages = text.split("|")
    if "m" in text:
        draft.cannot(name, "layers that predict further tokens")
    if not text.startswith("E") or not text.endswith("L") or any("t" not in stage for stage in stages):
        draft.problem(name, "stages without a transformer layer are not modelled")
    return [stage.count("t") for stage in stages]


def put_recomputation(draft: Draft, degrees: Degrees) -> None:
    """The sections `checkpoint` and `offload`. Megatron's checkpoint is a reentrant one."""
    granularity = draft.get("recompute-granularity")
    names = ["recompute-granularity"]
    if draft.has("recompute-activations"):
        granularity, names = "selective", ["recompute-activations"]
        draft.use("recompute-granularity", "not used: --recompute-activations counts")
    if draft.has("checkpoint-activations") and granularity is None:
        draft.put(
            "checkpoint.segment", draft.get("checkpoint-num-layers"), "checkpoint-activations", "checkpoint-num-layers"
        )
        draft.put("checkpoint.reentrant", True, note="Megatron's checkpoint is reentrant")
    elif granularity == "full":
        _put_full(draft, degrees)
    elif granularity == "selective":
        _put_selective(draft, names)
    elif granularity is not None:
        draft.problem("recompute-granularity", f"{granularity}: full or selective is expected")
    _put_offload(draft, degrees)


def _put_full(draft: Draft, degrees: Degrees) -> None:
    """uniform: regions of so many layers; block: the first so many layers of every stage."""
    method, count = draft.get("recompute-method"), draft.get("recompute-num-layers")
    if method not in ("uniform", "block"):
        draft.problem("recompute-method", "full recomputation needs uniform or block")
        return
    if count is None:
        if method == "block":
            draft.problem("recompute-num-layers", "is missing: block needs the number of layers")
            return
        count = 1
    most = max(1, degrees.layers // degrees.stages)
    names = ("recompute-method", "recompute-num-layers")
    if method == "uniform":
        draft.put("checkpoint.segment", min(count, most), *names)
    elif count == 0:
        draft.use("recompute-num-layers", "no layer is recomputed")
        return
    else:
        draft.put("checkpoint.first", min(count, most), *names)
    draft.put("checkpoint.reentrant", True, "recompute-granularity", note="Megatron's checkpoint is reentrant")


def _put_selective(draft: Draft, names: list[str]) -> None:
    """Parts of every layer; core attention unless modules are named."""
    modules = draft.get("recompute-modules") if draft.has("recompute-modules") else ("core_attn",)
    inside: list[Any] = [INSIDE[name] for name in modules or () if name in INSIDE]
    discard = [DISCARDED[name] for name in modules or () if name in DISCARDED]
    others = [name for name in modules or () if name not in INSIDE and name not in DISCARDED]
    if others:
        draft.cannot("recompute-modules", f"recomputation of {', '.join(others)}")
    if "recompute-modules" in draft.given:
        names = [*names, "recompute-modules"]
    if inside:
        draft.put(
            "checkpoint.inside", inside, *names, note="" if len(names) > 1 else "Megatron's default module: core_attn"
        )
        draft.put("checkpoint.reentrant", True, note="Megatron's checkpoint is reentrant")
    if discard:
        draft.put("checkpoint.discard", discard, *names)
    for name in ("recompute-method", "recompute-num-layers"):
        if draft.has(name):
            draft.use(name, "not used by selective recomputation")


def _put_offload(draft: Draft, degrees: Degrees) -> None:
    count = draft.get("cpu-offloading-num-layers")
    if not count:
        draft.use("cpu-offloading-num-layers", "nothing is offloaded")
    elif degrees.pipeline > 1:
        draft.problem("cpu-offloading-num-layers", "Megatron offloads layers without a pipeline only")
    elif type(count) is int and 0 < count <= degrees.layers:
        draft.put("offload.what", "activations", "cpu-offloading-num-layers", note="Transformer Engine's offload")
        draft.put("offload.layers", list(range(count)), "cpu-offloading-num-layers")
    else:
        draft.problem("cpu-offloading-num-layers", f"{count}: layers up to {degrees.layers} are expected")
