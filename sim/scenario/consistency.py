"""Do valid sections fit each other, the model and the cluster? Checks note problems and warnings on the document."""

from __future__ import annotations

from sim.hardware.catalogue import Cluster
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.allocator.parse import SettingsError
from sim.scenario.allocator.settings import AllocatorSettings
from sim.scenario.checkpoint_section import CheckpointSection
from sim.scenario.checkpointing import FORMS
from sim.scenario.document import Document
from sim.scenario.schema import BatchSection, FsdpSection, OptimizerSection, ParallelSection, PrecisionSection

AnyModel = ModelConfig | ChainConfig


def check_batch(document: Document, batch: BatchSection, model: AnyModel) -> None:
    """Sequences beyond the model's positions: impossible with learned ones, unusual with rotary ones."""
    if isinstance(model, ChainConfig) or batch.seq_len <= model.max_positions:
        return
    path = ("batch", "seq_len")
    if model.rope == "none":
        document.problem(path, f"the model has {model.max_positions} learned positions (model.max_positions)")
    else:
        document.warning(path, f"the model was made for {model.max_positions} positions")


def check_fsdp(document: Document, fsdp: FsdpSection, model: AnyModel | None) -> None:
    """Resharding to fewer ranks needs a divisor of the degree, and neither 1 nor all (PyTorch's fully_shard)."""
    if isinstance(model, ModelConfig) and model.loss_chunks > 1:
        document.problem(("model", "loss_chunks"), "a chunked loss is modelled on one GPU only, not under fsdp")
    for name in ("reshard_after_forward", "root_reshard_after_forward"):
        ranks = getattr(fsdp, name)
        if type(ranks) is int and (fsdp.degree % ranks or ranks == fsdp.degree):
            path = ("parallel", "fsdp", name)
            document.problem(path, f"must divide the degree ({fsdp.degree}) and be smaller; all ranks is true")


def check_optimizer(
    document: Document,
    optimizer: OptimizerSection,
    batch: BatchSection | None,
    precision: PrecisionSection | None,
    parallel: ParallelSection | None,
) -> None:
    """Steps inside backward see one gradient at a time, of one micro-batch, on one GPU."""
    path = ("optimizer",)
    fsdp = parallel.fsdp if parallel is not None else None
    if parallel is not None and fsdp is None and (parallel.tensor is not None or parallel.data is not None):
        for name in ("name", "in_backward", "master_weights"):
            if getattr(optimizer, name) not in ("adamw", False):
                document.problem(
                    (*path, name), "Megatron's loop (tensor, data) has an Adam with main weights of its own"
                )
        return
    if optimizer.momentum and optimizer.name != "sgd":
        document.problem((*path, "momentum"), f"is SGD's; {optimizer.name} has its own moments")
    if optimizer.master_weights and fsdp is not None:
        document.problem((*path, "master_weights"), "are modelled on one GPU only: under fsdp use parameters: fp32")
    elif optimizer.master_weights and precision is not None and precision.parameters == "fp32":
        document.problem((*path, "master_weights"), "are for 16-bit parameters: precision.parameters is fp32")
    if not optimizer.in_backward:
        return
    if optimizer.clip_norm is not None:
        document.problem((*path, "clip_norm"), "with in_backward there is never a whole gradient to clip: null")
    if batch is not None and batch.accumulation > 1:
        document.problem((*path, "in_backward"), "each backward steps: batch.accumulation must be 1", show=False)
    if fsdp is not None:
        document.problem((*path, "in_backward"), "is modelled on one GPU only, not under fsdp", show=False)


def check_mode(document: Document, mode: str, checkpoint: CheckpointSection | None, model: AnyModel | None) -> None:
    """Checkpointing saves what autograd would save, and under no_grad that is nothing."""
    if mode != "train" and isinstance(model, ChainConfig):
        document.problem(("mode",), "a chain is only trained")
    if mode == "no_grad" and checkpoint is not None:
        document.warning(("checkpoint",), "has no effect under no_grad: nothing is saved, nothing recomputed")


def check_megatron_parallel(
    document: Document, parallel: ParallelSection, model: AnyModel | None, batch: BatchSection | None
) -> None:
    """Megatron's tensor and data parallelism want its implementation, and shares without remainder."""
    tensor = parallel.tensor
    if parallel.data is not None and parallel.fsdp is not None:
        document.problem(("parallel", "data"), "fsdp is data parallelism already: leave one out", show=False)
    if model is None:
        return
    for name in ("tensor", "data"):
        if getattr(parallel, name) is not None and getattr(model, "implementation", "") != "megatron":
            document.problem(("parallel", name), "only implementation megatron is written for it", show=False)
            return
    if tensor is None or isinstance(model, ChainConfig):
        return
    shared = {"heads": model.heads, "ffn_hidden": model.ffn_hidden, "vocab": model.vocab}
    for name, value in shared.items():
        if value % tensor.degree:
            document.problem(("parallel", "tensor", "degree"), f"must divide model.{name} ({value})")
    if tensor.sequence_parallel and batch is not None and batch.seq_len % tensor.degree:
        path = ("parallel", "tensor", "sequence_parallel")
        document.problem(path, f"needs a degree that divides batch.seq_len ({batch.seq_len})", show=False)


def check_under_pipeline(
    document: Document,
    checkpoint: CheckpointSection | None,
    optimizer: OptimizerSection | None,
    mode: str,
    model: AnyModel | None,
) -> None:
    """What is modelled for whole models on one rank only."""
    only = "is modelled without a pipeline only"
    for form in FORMS:
        if checkpoint is not None and getattr(checkpoint, form):
            document.problem(("checkpoint", form), f"{only}: a stage has layers of its own")
    for name in ("in_backward", "master_weights"):
        if optimizer is not None and getattr(optimizer, name):
            document.problem(("optimizer", name), only, show=False)
    if mode != "train":
        document.problem(("mode",), only)
    if isinstance(model, ModelConfig) and model.loss_chunks > 1:
        document.problem(("model", "loss_chunks"), only)


def check_precision(
    document: Document, precision: PrecisionSection, fsdp: FsdpSection | None, cluster: Cluster, model: AnyModel | None
) -> None:
    """Something must cast: FSDP's policy, autocast, or parameters that already have the compute dtype."""
    path = ("precision", "autocast")
    if precision.autocast and precision.compute == "fp32":
        document.problem(path, "autocast computes in bf16 or fp16, but precision.compute is fp32")
    if fsdp is None and precision.autocast is False and precision.compute != precision.parameters:
        dtypes = f"parameters in {precision.parameters} and compute in {precision.compute}"
        document.problem(path, f"on one GPU nothing else casts: {dtypes} need autocast: true")
    if isinstance(model, ModelConfig) and model.implementation == "megatron":
        _check_megatron_precision(document, precision, fsdp)
    if precision.compute not in dict(cluster.gpu.peaks):
        document.warning(("precision", "compute"), f"{cluster.gpu.title} has no {precision.compute} matrix units")


def check_allocator(document: Document, text: str, version: str) -> None:
    """The text must be one that this PyTorch takes in PYTORCH_CUDA_ALLOC_CONF."""
    try:
        AllocatorSettings.parse(text, version)
    except SettingsError as error:
        for problem in error.problems:
            document.problem(("allocator",), str(problem), show=False)


def _check_megatron_precision(document: Document, precision: PrecisionSection, fsdp: FsdpSection | None) -> None:
    """Megatron's own layers run in 16 bit: its masked softmax knows no other dtype, and it does not use autocast."""
    computes_16_bit = precision.compute in ("bf16", "fp16")
    if precision.autocast or not computes_16_bit or (fsdp is None and precision.parameters != precision.compute):
        message = "megatron runs in 16 bit without autocast: parameters and compute bf16 (or both fp16)"
        document.problem(("precision",), message)
