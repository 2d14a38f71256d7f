"""Long sequences in tiles: what the tiled MLP is not modelled with."""

from __future__ import annotations

from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.document import Document
from sim.scenario.schema import OptimizerSection, ParallelSection
from sim.scenario.sections import Sections


def check_tiles(document: Document, model: ModelConfig | ChainConfig | None, sections: Sections) -> None:
    """A tile's backward adds to gradients, which no hook but DeepSpeed's and FSDP2's knows to wait for."""
    if not isinstance(model, ModelConfig) or model.mlp_tiles == 1:
        return
    parallel: ParallelSection = sections.get("parallel") or ParallelSection()
    optimizer: OptimizerSection | None = sections.get("optimizer")
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
