"""Sharding families stand alone: what they are not modelled with is refused here."""

from __future__ import annotations

from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.context import ContextSection
from sim.scenario.document import Document
from sim.scenario.families import ZeroSection
from sim.scenario.parallel import Zero
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.schema import BatchSection, OptimizerSection, ParallelSection
from sim.scenario.sections import Sections

FAMILIES = ("ddp", "fsdp1", "zero")
"""Fields of `parallel`."""
OTHERS = ("fsdp", "data", "tensor", "context", "pipeline")


def check_families(
    document: Document, parallel: ParallelSection, model: ModelConfig | ChainConfig | None, sections: Sections
) -> None:
    """One family at a time, over whole models of language, without what changes gradients or parameters otherwise."""
    given = [name for name in FAMILIES if getattr(parallel, name) is not None]
    if not given:
        return
    family = given[0]
    path = ("parallel", family)
    others = [name for name in OTHERS if getattr(parallel, name) is not None]
    if family == "zero" and getattr(model, "implementation", "") == "transformers" and "context" in others:
        others.remove("context")  # DeepSpeed-Ulysses
    for other in (*given[1:], *others):
        document.problem(path, f"is modelled alone, not with parallel.{other}: leave one out", show=False)
    if isinstance(model, ChainConfig):
        document.problem(path, "a chain has no parameters to share", show=False)
    elif model is not None and model.implementation == "megatron":
        document.problem(path, "implementation megatron has its own: parallel.data", show=False)
    elif model is not None and family != "ddp" and (model.frozen or model.lora):
        field = "frozen" if model.frozen else "lora"
        document.problem(
            ("model", field), f"a flat parameter is trained whole: not modelled under {family}", show=False
        )
    if parallel.fsdp1 is not None and parallel.fsdp1.strategy == "no_shard" and parallel.fsdp1.replicas > 1:
        document.problem((*path, "replicas"), "no_shard replicates over degree already: 1")
    if parallel.zero is not None:
        check_zero(document, parallel.zero)
        _check_cpu_adam(document, parallel.zero, sections.get("optimizer"))
    if (sections.get("mode") or "train") != "train":
        document.problem(("mode",), f"under {family} only training is modelled")
    optimizer: OptimizerSection | None = sections.get("optimizer")
    for name in ("in_backward", "master_weights", "fp32_gradients"):
        if optimizer is not None and getattr(optimizer, name):
            document.problem(("optimizer", name), f"is modelled on one GPU only, not under {family}", show=False)
    batch: BatchSection | None = sections.get("batch")
    ddp = parallel.ddp
    if ddp is not None and ddp.static_graph and ddp.gradient_sync == "last" and batch and batch.accumulation > 1:
        message = "fails in PyTorch without a sum in the first iteration (expect_autograd_hooks_): gradient_sync: every"
        document.problem((*path, "static_graph"), message)
    if (
        getattr(getattr(parallel, family), "gradient_sync", "every") == "last"
        and batch is not None
        and batch.accumulation == 1
    ):
        document.warning((*path, "gradient_sync"), "has no effect: a step has one micro-batch")


def check_zero_precision(document: Document, precision: PrecisionSection) -> None:
    """DeepSpeed holds the model in the dtype that it computes in; fp32 copies are the optimizer's."""
    if precision.parameters != precision.compute or precision.autocast:
        advice = f"ZeRO's model is in the dtype of compute, its fp32 copy the optimizer's: {precision.compute}"
        document.problem(("precision", "parameters"), advice)


def check_zero(document: Document, zero: ZeroSection) -> None:
    """What speaks of gathered parameters needs stage 3."""
    for name in OF_STAGE_3:
        if zero.stage != 3 and getattr(zero, name) is not None:
            document.problem(("parallel", "zero", name), f"is stage 3's: stage {zero.stage} gathers no parameters")
    _check_offload(document, zero)


def _check_cpu_adam(document: Document, zero: ZeroSection, optimizer: OptimizerSection | None) -> None:
    """DeepSpeed's optimizer on the CPU is an Adam of its own."""
    if zero.offload_optimizer is None or optimizer is None:
        return
    if optimizer.name != "adamw":
        document.problem(("optimizer", "name"), "on the CPU (parallel.zero.offload_optimizer) only adamw is modelled")
    elif optimizer.variant != "fused":
        document.problem(("optimizer", "variant"), "the CPU's Adam (parallel.zero.offload_optimizer) is fused")


def _check_offload(document: Document, zero: ZeroSection) -> None:
    """Parameters leave where the optimizer has left; drives are for stage 3; pipelining is of what drives hold."""
    path = ("parallel", "zero")
    if zero.offload_param is not None and zero.stage != 3:
        document.problem(
            (*path, "offload_param"), f"is stage 3's: stage {zero.stage} has whole parameters on every GPU"
        )
    elif zero.offload_param is not None and zero.offload_optimizer is None:
        advice = "is modelled with the optimizer on the host too: add offload_optimizer: cpu"
        document.problem((*path, "offload_param"), advice)
    if zero.offload_optimizer == "nvme" and zero.stage != 3:
        document.problem(
            (*path, "offload_optimizer"), f"nvme is stage 3's: stage {zero.stage} keeps states in main memory"
        )
    for name in ("pipeline_read", "pipeline_write"):
        if getattr(zero, name) is not None and zero.offload_optimizer != "nvme":
            document.problem((*path, name), "is of drives: needs offload_optimizer: nvme")


OF_STAGE_3 = {
    "prefetch_bucket_size": "prefetch_bucket",
    "persistence_threshold": "persistence_threshold",
    "max_live_parameters": "max_live",
    "max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group",
}
"""Fields of stage 3, and their names in `Zero`."""


def resolve_zero(section: ZeroSection, context: ContextSection | None = None) -> Zero:
    """The sizes that a section means. Ranks that share sequences share states too."""
    given = {name: value for field, name in OF_STAGE_3.items() if (value := getattr(section, field)) is not None}
    return Zero(
        degree=section.degree * (context.degree if context is not None else 1),
        stage=section.stage,
        reduce_bucket=section.reduce_bucket_size,
        overlap_comm=section.overlap_comm,
        offload_optimizer=section.offload_optimizer,
        offload_param=section.offload_param,
        pipeline_read=bool(section.pipeline_read),
        pipeline_write=bool(section.pipeline_write),
        **given,
    )
