"""What can be compiled, and what the section `compile` means."""

from __future__ import annotations

from sim.hardware.catalogue import Cluster
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.checkpoint_section import CheckpointSection
from sim.scenario.compile_section import CompileSection
from sim.scenario.document import Document
from sim.scenario.offload import OffloadSection
from sim.scenario.parallel import SPLITS_BACKWARD
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.schema import ParallelSection
from sim.scenario.setup import Compile

FLASH_FROM = (8, 0)
"""Compute capability from which flash attention runs."""
COMPILED = (("llama", "torchtitan"), ("llama", "transformers"), ("gpt", "nanogpt"), ("gpt", "transformers"))
"""Families and implementations whose blocks' operators the tracer knows."""
NOT_COMPILED = ("segment", "sequential", "nested", "boundaries", "inside", "discard", "reentrant", "keep_micro_batches")
"""Settings of checkpoint that are modelled in eager mode only."""


def check_compile(
    document: Document,
    section: CompileSection,
    model: ModelConfig | ChainConfig,
    cluster: Cluster | None,
    precision: PrecisionSection | None,
    checkpoint: CheckpointSection | None,
    parallel: ParallelSection,
    offload: OffloadSection | None,
) -> None:
    """Whole blocks with flash attention; what wraps parts of a block, or several, is modelled in eager mode only."""
    path = ("compile",)
    if isinstance(model, ChainConfig):
        document.problem(path, "a chain has no operators to compile", show=False)
        return
    if (model.family, model.implementation) not in COMPILED:
        message = f"{model.implementation}'s {model.family} blocks are modelled in eager mode only"
        document.problem(path, message, show=False)
        return
    if model.lora is not None and (model.lora.base is not None or model.lora.dropout):
        what = "a 4-bit base" if model.lora.base is not None else "dropout"
        document.problem(path, f"adapters with {what} are modelled in eager mode only", show=False)
    if model.attention != "sdpa" or model.head_dim % 8:
        what = f"attention: {model.attention}" if model.attention != "sdpa" else f"heads of {model.head_dim}"
        document.problem(path, f"blocks are modelled compiled with flash attention only, not with {what}", show=False)
    if model.experts is not None or model.latent is not None:
        what = "experts" if model.experts is not None else "latent attention"
        document.problem(path, f"blocks with {what} are modelled in eager mode only", show=False)
    if precision is not None and precision.compute == "fp32":
        document.problem(path, "blocks are modelled compiled in 16 bit only, not with compute: fp32", show=False)
    if cluster is not None and cluster.gpu.compute_capability < FLASH_FROM:
        document.problem(path, f"Inductor and flash attention need compute capability 8.0: not {cluster.gpu.title}")
    for name in NOT_COMPILED if checkpoint is not None else ():
        if getattr(checkpoint, name) != CheckpointSection.model_fields[name].default:
            document.problem(("checkpoint", name), "with compile, whole layers are checkpointed: every, first, save")
    for choice in checkpoint.layers if checkpoint is not None else ():
        if choice is not None and (choice.inside or choice.discard or choice.reentrant):
            document.problem(("checkpoint", "layers"), "with compile, a layer is checkpointed as a whole", show=False)
            break
    shared = () if model.implementation == "torchtitan" else ("context", "tensor")
    eager = ("fsdp1", "zero", *shared)
    for name in eager:
        if getattr(parallel, name) is not None:
            message = "is modelled in eager mode only"
            document.problem(("parallel", name), message, show=False)
    if parallel.fsdp is not None and parallel.fsdp.wrap != "fsdp(checkpoint)":
        document.problem(("parallel", "fsdp", "wrap"), "with compile, FSDP is outside: its hooks are not compiled")
    if parallel.pipeline is not None and parallel.pipeline.schedule in SPLITS_BACKWARD:
        message = "splits backward, which a compiled block runs as one function: use 1f1b or interleaved"
        document.problem(("parallel", "pipeline", "schedule"), message)
    if section.loss and (model.implementation != "torchtitan" or parallel.pipeline is not None):
        document.problem(("compile", "loss"), "is modelled for torchtitan without a pipeline only")
    elif section.loss and parallel.tensor is not None:
        document.problem(("compile", "loss"), "is modelled for a whole vocabulary, not with parallel.tensor")
    elif section.loss and model.loss_chunks > 1:
        document.problem(("compile", "loss"), "is modelled for a whole loss: model.loss_chunks must be 1")
    if offload is not None:
        document.problem(("offload",), "is modelled in eager mode only, not with compile", show=False)


def check_asynchronous(document: Document, parallel: ParallelSection, compiled: bool) -> None:
    """Inductor makes the pieces of asynchronous tensor parallelism."""
    tensor = parallel.tensor
    if tensor is not None and tensor.asynchronous and not compiled:
        document.problem(("parallel", "tensor", "asynchronous"), "is Inductor's work: add compile: {}")


def resolve_compile(section: CompileSection | None) -> Compile | None:
    """What the section means."""
    return None if section is None else Compile(**section.model_dump())
