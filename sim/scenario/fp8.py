"""Transformer Engine's products in 8 or 4 bit in a scenario: what they fit, and what comes out."""

from __future__ import annotations

from dataclasses import replace

from sim.hardware.catalogue import Cluster
from sim.model.config import Fp8, ModelConfig
from sim.scenario.checkpoint_section import CheckpointSection, RegionSection
from sim.scenario.document import Document
from sim.scenario.parallel import SPLITS_BACKWARD
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.schema import ParallelSection

STORED = ("parallel", "data", "fp8_parameters")
HOPPER = 9
"""Compute capability of tensor cores whose products are scaled block by block in fp32; from Blackwell on in mxfp8's blocks."""
BLOCK_SCALES_FROM = (10, 0)
"""Compute capability of tensor cores that scale blocks of 32 numbers."""


def with_fp8(
    document: Document, precision: PrecisionSection, parallel: ParallelSection, model: ModelConfig, mode: str
) -> ModelConfig:
    """The model with its products in 8 or 4 bit, or without them where something is wrong, which is noted."""
    recipe, edge, path = precision.narrow, precision.fp8_edge_layers, path_of(precision)
    stored = parallel.data is not None and parallel.data.fp8_parameters
    if recipe is None:
        if edge:
            document.problem(
                ("precision", "fp8_edge_layers"), "leaves layers out of precision.fp8 or fp4, which is not set"
            )
        if stored:
            document.problem(STORED, "needs precision.fp8: delayed or tensorwise")
        return model
    before = len(document.problems)
    if model.implementation != "megatron" or model.family not in ("llama", "gpt"):
        of = f"{model.implementation}'s {model.family}"
        document.problem(path, f"is Transformer Engine's, for megatron's Llama-like models and GPT, not for {of}")
        return model
    if precision.fp8 is not None and precision.fp4 is not None:
        document.problem(path, "precision.fp4 is set too: products are in 8 bit or in 4")
    if precision.float8 is not None:
        document.problem(path, "precision.float8 is set too: one is Transformer Engine's, the other torchao's")
    if precision.compute == "fp32":
        document.problem(path, "is modelled beside 16 bit only, not with compute: fp32")
    if mode != "train":
        document.problem(path, "is modelled for mode: train only")
    if 2 * edge >= model.layers:
        document.problem(("precision", "fp8_edge_layers"), f"leaves none of {model.layers} layers to {'.'.join(path)}")
    _check_sizes(document, path, parallel, model, 32 if recipe == "mxfp8" else 16)
    _check_parallel(document, path, parallel, recipe, edge)
    if len(document.problems) > before:
        return model
    return replace(model, fp8=Fp8(recipe=recipe, first=edge, last=edge, stored=stored))


def path_of(precision: PrecisionSection) -> tuple[str, str]:
    """The field that asks for them."""
    return ("precision", "fp4" if precision.fp8 is None and precision.fp4 is not None else "fp8")


def _check_sizes(
    document: Document, path: tuple[str, str], parallel: ParallelSection, model: ModelConfig, multiple: int
) -> None:
    ranks = parallel.tensor.degree if parallel.tensor is not None else 1
    widths = {"hidden": model.hidden, "ffn_hidden": model.ffn_hidden // ranks}
    if model.latent is None:
        widths["heads"] = model.heads * model.head_dim // ranks
    for name, width in widths.items():
        if width % multiple:
            message = f"products need multiples of {multiple} on every rank: {width} comes of model.{name}"
            document.problem(path, message, show=False)


def _check_parallel(
    document: Document, path: tuple[str, str], parallel: ParallelSection, recipe: str, edge: int
) -> None:
    fsdp, data = parallel.fsdp, parallel.data
    loop = data is not None or parallel.tensor is not None or parallel.context is not None
    if fsdp is not None and not (fsdp.float8_all_gather and recipe in ("delayed", "tensorwise")):
        message = (
            "under fsdp weights are gathered in 8 bit: needs float8_all_gather: true, and fp8: delayed or tensorwise"
        )
        document.problem(path, message)
    elif fsdp is not None and edge:
        document.problem(("precision", "fp8_edge_layers"), "is not modelled under fsdp")
    elif fsdp is None and not loop:
        document.problem(path, "copies of weights are kept in Megatron's training loop: add parallel.data")
    if parallel.pipeline is not None and parallel.pipeline.schedule in SPLITS_BACKWARD:
        message = f"splits backward, which is not modelled with {'.'.join(path)}: use 1f1b or interleaved"
        document.problem(("parallel", "pipeline", "schedule"), message)
    if data is not None and data.fp8_parameters:
        if recipe not in ("delayed", "tensorwise"):
            document.problem(STORED, "is modelled for precision.fp8: delayed and tensorwise")
        if not (data.distributed_optimizer and data.gradient_accumulation_fusion):
            document.problem(STORED, "needs distributed_optimizer and gradient_accumulation_fusion")


def check_fp8_beside(document: Document, precision: PrecisionSection, cluster: Cluster | None) -> None:
    """The GPU must have the units."""
    if precision.narrow is None or cluster is None:
        return
    if precision.fp4 is not None and "fp4" not in dict(cluster.gpu.peaks):
        document.problem(("precision", "fp4"), f"{cluster.gpu.title} has no known rate of products in 4 bit")
    elif "fp8" not in dict(cluster.gpu.peaks):
        document.problem(path_of(precision), f"{cluster.gpu.title} has no 8-bit matrix units")
    elif precision.fp8 == "mxfp8" and cluster.gpu.compute_capability < BLOCK_SCALES_FROM:
        document.problem(path_of(precision), f"needs compute capability 10.0: not {cluster.gpu.title}")
    elif precision.fp8 == "blockwise" and cluster.gpu.compute_capability[0] != HOPPER:
        document.problem(
            path_of(precision),
            f"is for Hopper (compute capability 9.0), not {cluster.gpu.title}: use mxfp8 or tensorwise",
        )


def check_fp8_checkpoint(document: Document, precision: PrecisionSection, checkpoint: CheckpointSection | None) -> None:
    """Norms are inside the linear layers, activations are saved in few bits, and no operator of aten runs there."""
    if precision.narrow is None or checkpoint is None:
        return
    name = ".".join(path_of(precision))
    regions: list[tuple[tuple[str, ...], RegionSection]] = [(("checkpoint",), checkpoint)]
    regions += [(("checkpoint", "layers"), choice) for choice in checkpoint.layers if choice is not None]
    for path, region in regions:
        if region.discard:
            document.problem((*path, "discard"), f"is not modelled with {name}")
        if "norm" in region.inside:
            document.problem((*path, "inside"), f"with {name} norms are inside Transformer Engine's linear layers")
        if region.save:
            document.problem((*path, "save"), "Transformer Engine's linear layers run no operators of aten")
