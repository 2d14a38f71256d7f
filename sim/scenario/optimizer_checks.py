"""What an optimizer, its steps inside backward and its states on the host do not fit."""

from __future__ import annotations

from sim.scenario.document import Document
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.schema import BatchSection, OptimizerSection, ParallelSection


def check_optimizer(
    document: Document,
    optimizer: OptimizerSection,
    batch: BatchSection | None,
    precision: PrecisionSection | None,
    parallel: ParallelSection | None,
) -> None:
    """Steps inside backward see one gradient at a time, of one micro-batch."""
    path = ("optimizer",)
    fsdp = parallel.fsdp if parallel is not None else None
    if parallel is not None and fsdp is None and (parallel.tensor is not None or parallel.data is not None):
        for name in ("name", "in_backward", "master_weights", "offload"):
            if getattr(optimizer, name) not in ("adamw", False, None):
                document.problem(
                    (*path, name), "Megatron's loop (tensor, data) has an Adam with main weights of its own"
                )
        if optimizer.variant != "fused":
            document.warning(
                (*path, "variant"), "has no effect: Megatron's Adam is one multi-tensor kernel (tensor, data)"
            )
        return
    if fsdp is not None and fsdp.cpu_offload and optimizer.name != "adamw":
        document.problem((*path, "name"), "on the CPU (parallel.fsdp.cpu_offload) only adamw is modelled")
    if optimizer.momentum and optimizer.name != "sgd":
        document.problem((*path, "momentum"), f"is SGD's; {optimizer.name} has its own moments")
    if optimizer.master_weights and fsdp is not None and fsdp.cpu_offload:
        document.problem((*path, "master_weights"), "are not modelled on the CPU (parallel.fsdp.cpu_offload)")
    elif optimizer.master_weights and precision is not None and precision.parameters == "fp32":
        document.problem((*path, "master_weights"), "are for 16-bit parameters: precision.parameters is fp32")
    if optimizer.fp32_gradients and not optimizer.master_weights:
        document.problem((*path, "fp32_gradients"), "are those of fp32 parameters: needs master_weights: true")
    elif optimizer.fp32_gradients and (fsdp is not None or optimizer.in_backward):
        other = "in_backward" if fsdp is None else "parallel.fsdp"
        document.problem(
            (*path, "fp32_gradients"), f"is modelled on one GPU, with a step after backward, not with {other}"
        )
    _check_host_step(document, optimizer, batch, parallel)
    if not optimizer.in_backward:
        return
    if optimizer.clip_norm is not None:
        document.problem((*path, "clip_norm"), "with in_backward there is never a whole gradient to clip: null")
    if batch is not None and batch.accumulation > 1:
        document.problem((*path, "in_backward"), "each backward steps: batch.accumulation must be 1", show=False)
    if fsdp is not None and fsdp.cpu_offload:
        document.problem((*path, "in_backward"), "on the CPU (parallel.fsdp.cpu_offload) steps come after backward")


def _check_host_step(
    document: Document, optimizer: OptimizerSection, batch: BatchSection | None, parallel: ParallelSection | None
) -> None:
    """An optimizer on the CPU beside parameters on the GPU: AdamW, on one GPU, with gradients that leave unclipped."""
    if optimizer.offload is None:
        return
    path = ("optimizer", "offload")
    for name, usual in (("name", "adamw"), ("master_weights", False), ("in_backward", False)):
        if getattr(optimizer, name) != usual:
            document.problem(path, f"is modelled for adamw alone, not with optimizer.{name}")
    if optimizer.clip_norm is not None:
        document.problem(
            ("optimizer", "clip_norm"), "gradients leave before their norm is known (optimizer.offload): null"
        )
    if optimizer.offload == "gradients" and batch is not None and batch.accumulation > 1:
        document.problem(
            path, "a gradient that has left cannot be added to: batch.accumulation must be 1, or use states"
        )
    if parallel is not None and parallel != ParallelSection():
        document.problem(path, _in_its_place(parallel))


def _in_its_place(parallel: ParallelSection) -> str:
    """Why torchao's optimizer, which is written for one GPU, is not played, and what several GPUs have instead."""
    if parallel.fsdp is not None:
        return "is torchao's for one GPU: several have parallel.fsdp.cpu_offload"
    if parallel.zero is not None:
        return "is torchao's for one GPU: DeepSpeed's is parallel.zero.offload_optimizer"
    if parallel.ddp is not None:
        return (
            "is torchao's for one GPU: under DDP gradients would leave before they are summed;"
            " use parallel.zero.offload_optimizer"
        )
    return "is modelled on one GPU only, not with parallel"
