"""A scenario's strategy as Megatron-LM's arguments.

What is written is imported again and compared field by field: whatever does not come back the same is told, so that no
difference is silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from sim.interop.draft import ImportProblems
from sim.interop.megatron import import_megatron
from sim.interop.options import Options
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.problems import Problem, ScenarioError, shown
from sim.scenario.setup import Setup

MODULES = {"core_attention": "core_attn", "mlp": "mlp", "norm": "layernorm"}


class ExportProblems(ScenarioError):
    """A scenario that no launch command can be made of."""

    ending: ClassVar[str] = "Nothing was exported."


NOT_COMPARED = ("name", "model.name", "cluster", "mesh", "profile", "gemm_efficiency", "attention_kernel", "torch")
"""What Megatron's arguments are not about; nodes and GPUs per node are compared by themselves."""


def export_megatron(setup: Setup, file: str) -> tuple[str, list[str]]:
    """A launch command, and what it does not say: "optimizer.name: adamw, but sgd comes back".

    Raises ExportProblems where Megatron has nothing of the kind.
    """
    model = setup.model
    if isinstance(model, ChainConfig) or model.implementation != "megatron":
        message = "only models of implementation megatron are Megatron's"
        raise ExportProblems([Problem(file=file, path="model.implementation", message=message)])
    launch = f"torchrun --nproc-per-node {setup.cluster.gpus_per_node} --nnodes {setup.cluster.nodes} pretrain_gpt.py"
    groups = [
        _network(model), _experts(model), _batch(setup), _parallel(setup), _recomputation(setup), _numbers(setup),
    ]  # fmt: skip
    text = " \\\n    ".join([launch, *(" ".join(group) for group in map(list, groups) if group)]) + "\n"
    options = Options(gpu=setup.cluster.gpu.name)
    try:
        again = import_megatron(Path(file).with_suffix(".sh"), text, options).scenario.strategies[0]
    except ImportProblems as error:
        raise ExportProblems(error.problems) from None
    nodes = [(s.cluster.nodes, s.cluster.gpus_per_node) for s in (setup, again)]
    lost = list(_differences(setup, again, ""))
    return text, lost + ([f"cluster: {nodes[0]}, but {nodes[1]} comes back"] if nodes[0] != nodes[1] else [])


def _network(model: ModelConfig) -> Iterator[str]:
    yield f"--num-layers {model.layers} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn_hidden}"
    yield f"--num-attention-heads {model.heads}" + (f" --mtp-num-layers {model.mtp_layers}" if model.mtp_layers else "")
    if model.latent is None and model.head_dim != model.hidden // model.heads:
        yield f"--kv-channels {model.head_dim}"
    if model.kv_heads != model.heads:
        yield f"--group-query-attention --num-query-groups {model.kv_heads}"
    yield f"--max-position-embeddings {model.max_positions} --padded-vocab-size {model.vocab}"
    if model.family == "llama":
        yield "--swiglu --normalization RMSNorm --position-embedding-type rope"
    if not model.bias:
        yield "--disable-bias-linear"
    flags = {
        "--add-qkv-bias": model.qkv_bias,
        "--qk-layernorm": model.qk_norm,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--no-bias-gelu-fusion": model.family == "gpt" and not model.bias_gelu_fusion,
        "--no-bias-dropout-fusion": not model.bias_dropout_fusion,
        "--no-persist-layer-norm": not model.persistent_norm,
        "--attention-backend unfused": model.attention == "unfused",
        f"--cross-entropy-loss-fusion --cross-entropy-fusion-impl {model.loss_fusion}": model.loss_fusion != "none",
    }
    yield from (flag for flag, is_set in flags.items() if is_set)
    yield f"--hidden-dropout {model.dropout:g} --attention-dropout {model.dropout:g}"


def _experts(model: ModelConfig) -> Iterator[str]:
    latent, experts = model.latent, model.experts
    if latent is not None:
        yield f"--multi-latent-attention --kv-lora-rank {latent.kv_rank} --qk-head-dim {model.head_dim}"
        yield f"--qk-pos-emb-head-dim {latent.rope_head_dim} --v-head-dim {latent.value_head_dim}"
        if latent.q_rank:
            yield f"--q-lora-rank {latent.q_rank}"
    if experts is None:
        return
    yield f"--num-experts {experts.count} --moe-router-topk {experts.top_k} --moe-ffn-hidden-size {experts.ffn_hidden}"
    yield f"--moe-grouped-gemm --moe-token-dispatcher-type {experts.dispatcher} --moe-router-score-function {experts.scores}"
    yield f"--moe-router-load-balancing-type {'aux_loss' if experts.auxiliary_loss else 'none'}"
    if experts.every > 1:
        yield f"--moe-layer-freq '([0]*{experts.every - 1}+[1])*{model.layers // experts.every}'"
    elif experts.dense_layers:
        yield f"--moe-layer-freq '([0]*{experts.dense_layers}+[1]*{model.layers - experts.dense_layers})'"
    if experts.shared_ffn_hidden:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_ffn_hidden}"
    if experts.groups > 1:
        yield f"--moe-router-num-groups {experts.groups} --moe-router-group-topk {experts.groups_top}"
    if experts.scaling is not None:
        yield f"--moe-router-topk-scaling-factor {experts.scaling:g}"
    if experts.capacity_factor is not None:
        yield f"--moe-expert-capacity-factor {experts.capacity_factor:g}"
    flags = {
        "--moe-shared-expert-gate": experts.shared_gate,
        "--moe-router-pre-softmax": experts.scores_first,
        "--moe-router-enable-expert-bias": experts.selection_bias,
        "--moe-permute-fusion": experts.permute_fusion,
        "--moe-router-dtype fp32": experts.router_dtype == "fp32",
    }
    yield from (flag for flag, is_set in flags.items() if is_set)


def _batch(setup: Setup) -> Iterator[str]:
    batch = setup.batch
    total = batch.micro_batch * batch.accumulation * setup.data_parallel
    yield f"--seq-length {batch.seq_len} --micro-batch-size {batch.micro_batch} --global-batch-size {total}"


def _parallel(setup: Setup) -> Iterator[str]:
    if setup.tensor.degree > 1:
        yield f"--tensor-model-parallel-size {setup.tensor.degree}"
        yield from ["--sequence-parallel"] if setup.tensor.sequence_parallel else []
    if setup.context.degree > 1:
        kind = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a"}[setup.context.kind]
        yield f"--context-parallel-size {setup.context.degree} --cp-comm-type {kind}"
    if setup.expert.degree > 1:
        yield f"--expert-model-parallel-size {setup.expert.degree}"
    if _has_experts(setup) and setup.expert.tensor != setup.tensor.degree:
        yield f"--expert-tensor-parallel-size {setup.expert.tensor}"
    if (pipeline := setup.pipeline) is not None:
        yield f"--pipeline-model-parallel-size {pipeline.degree}"
        stages = ["t" * count for count in pipeline.placement]
        if len(set(pipeline.placement)) > 1:
            layout = "|".join(stages)
            yield f"--pipeline-model-parallel-layout 'E{layout}L'"
        elif pipeline.chunks > 1:
            yield f"--num-virtual-stages-per-pipeline-rank {pipeline.chunks}"
        if pipeline.chunks > 1 and not pipeline.overlap_p2p:
            yield "--no-overlap-p2p-communication"
    if (data := setup.data) is not None:
        flags = {
            "--use-distributed-optimizer": data.distributed_optimizer,
            "--overlap-grad-reduce": data.overlap,
            "--no-gradient-accumulation-fusion": not data.gradient_accumulation_fusion,
        }
        yield from (flag for flag, is_set in flags.items() if is_set)
        if data.optimizer_instances > 1:
            yield f"--num-distributed-optimizer-instances {data.optimizer_instances}"
        if data.moments != "fp32":
            yield "--use-precision-aware-optimizer"
            yield f"--exp-avg-dtype {data.moments} --exp-avg-sq-dtype {data.moments}"
    if setup.fsdp is not None:
        yield "--use-torch-fsdp2"
        yield from ["--torch-fsdp2-no-reshard-after-forward"] if setup.fsdp.reshard_after_forward is False else []


def _has_experts(setup: Setup) -> bool:
    return isinstance(setup.model, ModelConfig) and setup.model.experts is not None


def _recomputation(setup: Setup) -> Iterator[str]:
    checkpoint = setup.checkpoint
    if checkpoint is not None and (checkpoint.inside or checkpoint.discard):
        modules = [MODULES[name] for name in (*checkpoint.inside, *checkpoint.discard) if name in MODULES]
        yield f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"
    elif checkpoint is not None:
        method, count = ("block", checkpoint.first) if checkpoint.first else ("uniform", checkpoint.segment)
        yield f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {count}"
    if setup.offload is not None and setup.offload.layers is not None:
        yield f"--cpu-offloading-num-layers {len(setup.offload.layers)}"


def _numbers(setup: Setup) -> Iterator[str]:
    precision = setup.precision
    yield "--fp16" if precision.compute == "fp16" else "--bf16"
    if precision.compute == "fp16" and precision.reduce == "fp32":
        yield "--accumulate-allreduce-grads-in-fp32"
    if precision.compute == "bf16" and precision.reduce == "bf16":
        yield "--grad-reduce-in-bf16"
    fp8 = setup.model.fp8 if isinstance(setup.model, ModelConfig) else None
    if fp8 is not None and fp8.recipe == "nvfp4":
        yield "--fp4-format e2m1 --fp4-recipe nvfp4"
    elif fp8 is not None:
        yield f"--fp8-format hybrid --fp8-recipe {fp8.recipe}" + (" --fp8-param-gather" if fp8.stored else "")
    if fp8 is not None and fp8.first:
        yield f"--first-last-layers-bf16 --num-layers-at-start-in-bf16 {fp8.first} --num-layers-at-end-in-bf16 {fp8.last}"
    yield f"--clip-grad {setup.optimizer.clip_norm or 0:g}" if setup.optimizer is not None else "--clip-grad 0"


def _differences(ours: Any, again: Any, path: str) -> Iterator[str]:
    """Fields that differ, each once, by their paths in the resolved scenario."""
    if path in NOT_COMPARED or ours == again:
        return
    if is_dataclass(ours) and is_dataclass(again) and type(ours) is type(again):
        for field in fields(ours):
            below = f"{path}.{field.name}".lstrip(".")
            yield from _differences(getattr(ours, field.name), getattr(again, field.name), below)
    else:
        yield f"{path}: {shown(_short(ours))}, but {shown(_short(again))} comes back"


def _short(value: Any) -> Any:
    return type(value).__name__ if is_dataclass(value) else value
