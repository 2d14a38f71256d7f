"""torchao's 8-bit products in a scenario: what they fit, compiled and in eager mode."""

from __future__ import annotations

from sim.hardware.catalogue import Cluster
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.checkpoint_section import CheckpointSection
from sim.scenario.document import Document
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.schema import FsdpSection, ParallelSection

EAGER_FLOAT8 = (("llama", "torchtitan"), ("llama", "transformers"))


def check_float8(
    document: Document, precision: PrecisionSection, compiled: bool, cluster: Cluster | None, fsdp: FsdpSection | None
) -> None:
    """Tensor cores need 8 bit; gathering in 8 bit needs one scale per tensor."""
    path = ("precision", "float8")
    if precision.float8 is not None and cluster is not None and "fp8" not in dict(cluster.gpu.peaks):
        document.problem(path, f"{cluster.gpu.title} has no 8-bit matrix units")
    if fsdp is None or not fsdp.float8_all_gather:
        return
    gather = ("parallel", "fsdp", "float8_all_gather")
    if precision.float8 is not None and not compiled:
        document.problem(gather, "is modelled in compiled blocks: add compile: {}")
    if precision.float8 != "tensorwise" and precision.fp8 is None:
        document.problem(gather, "gathers matrices with one scale each: needs precision.float8: tensorwise")
    if fsdp.cpu_offload or (type(fsdp.reshard_after_forward) is int):
        what = "cpu_offload" if fsdp.cpu_offload else "reshard_after_forward to fewer ranks"
        document.problem(gather, f"is not modelled with {what}", show=False)


def check_eager_float8(
    document: Document,
    precision: PrecisionSection,
    model: ModelConfig | ChainConfig,
    checkpoint: CheckpointSection | None,
    parallel: ParallelSection,
    tokens: int,
) -> None:
    """Without compile each cast is kernels of its own (sim.runtime.ops.float8), with a scale per tensor."""
    path = ("precision", "float8")
    if precision.float8 == "rowwise":
        document.problem(path, "is modelled in compiled blocks only: add compile: {}, or use tensorwise")
    if isinstance(model, ChainConfig) or (model.family, model.implementation) not in EAGER_FLOAT8:
        document.problem(path, "is torchao's, in eager mode for Llama-like models of torchtitan and transformers")
        return
    for name, what in (("lora", "adapters"), ("experts", "experts")):
        if getattr(model, name) is not None:
            document.problem(path, f"is not modelled with {what} ({'model.' + name})", show=False)
    for other in ("tensor", "context", "pipeline"):
        if getattr(parallel, other) is not None:
            document.problem(
                path, f"is modelled in compiled blocks with parallel.{other}: add compile: {{}}", show=False
            )
    regions = (
        () if checkpoint is None else (checkpoint, *(choice for choice in checkpoint.layers if choice is not None))
    )
    if any(region.save for region in regions):
        document.problem(
            ("checkpoint", "save"), "is modelled with precision.float8 in compiled blocks: add compile: {}"
        )
    if tokens % 16:
        document.problem(path, f"8-bit products need multiples of 16 tokens, not {tokens}", show=False)
