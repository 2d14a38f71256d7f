"""Liger's kernels in a scenario: what they are not modelled with."""

from __future__ import annotations

from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.document import Document
from sim.scenario.precision_section import PrecisionSection

PATH = ("model", "liger")
FUSED_LOSS = "fused_linear_cross_entropy"


def check_liger(
    document: Document,
    model: ModelConfig | ChainConfig,
    precision: PrecisionSection,
    compiled: bool,
) -> None:
    """The fused loss reads the head's weight itself, and takes its own gradient for one."""
    if isinstance(model, ChainConfig) or not model.liger:
        return
    if compiled:
        document.problem(PATH, "is modelled in eager mode only, not with compile", show=False)
    if "swiglu" in model.liger and model.experts is not None:
        document.problem(PATH, "swiglu of experts is a kernel of its own (LigerExperts), which is not modelled")
    if FUSED_LOSS not in model.liger:
        return
    if precision.grad_scaler:
        document.problem(PATH, f"{FUSED_LOSS} is not modelled with precision.grad_scaler, which scales its gradients")
    if model.lora is not None and "head" in model.lora.targets:
        document.problem(PATH, f"{FUSED_LOSS} reads the head's own weight and would pass its adapter by")
