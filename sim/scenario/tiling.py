"""Long sequences in tiles: what the fused loss and the tiled MLP are not modelled with."""

from __future__ import annotations

from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.document import Document
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.schema import OptimizerSection, ParallelSection
from sim.scenario.sections import Sections


def check_tiles(document: Document, model: ModelConfig | ChainConfig | None, sections: Sections) -> None:
    """Liger's loss is a training step's, in one dtype. A tile's backward adds to gradients, which no hook but DeepSpeed's
    and FSDP2's knows to wait for."""
    if not isinstance(model, ModelConfig):
        return
    precision: PrecisionSection | None = sections.get("precision")
    parallel: ParallelSection = sections.get("parallel") or ParallelSection()
    optimizer: OptimizerSection | None = sections.get("optimizer")
    if model.fused_loss and (sections.get("mode") or "train") != "train":
        document.problem(("model", "fused_loss"), "is of training: evaluation computes whole logits")
    casts = precision is not None and (precision.autocast or precision.parameters != precision.compute)
    if model.fused_loss and casts and (precision is None or precision.autocast or parallel.fsdp is None):
        document.problem(("model", "fused_loss"), "is modelled in one dtype, not under autocast")
    if model.mlp_tiles == 1:
        return
    path = ("model", "mlp_tiles")
    if model.experts is not None:
        document.problem(path, "is of plain MLPs: the model has experts")
    if sections.get("compile") is not None:
        document.problem(path, "is modelled in eager mode only, not with compile")
    for name in ("ddp", "fsdp1"):
        if getattr(parallel, name) is not None:
            document.problem(path, f"parallel.{name} would reduce a gradient after the first tile: use zero or fsdp")
    if optimizer is not None and (optimizer.in_backward or optimizer.offload is not None):
        document.problem(path, "every tile's backward would step: not with optimizer.in_backward or offload")
