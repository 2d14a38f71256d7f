"""Do valid sections fit each other, the model and the cluster? Checks note problems and warnings on the document."""

from __future__ import annotations

from sim.hardware.catalogue import Cluster
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.allocator.parse import SettingsError
from sim.scenario.allocator.settings import AllocatorSettings
from sim.scenario.document import Document
from sim.scenario.schema import BatchSection, FsdpSection, PrecisionSection

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


def check_fsdp(document: Document, fsdp: FsdpSection) -> None:
    """Resharding to fewer ranks needs a divisor of the degree, and neither 1 nor all (PyTorch's fully_shard)."""
    for name in ("reshard_after_forward", "root_reshard_after_forward"):
        ranks = getattr(fsdp, name)
        if type(ranks) is int and (fsdp.degree % ranks or ranks == fsdp.degree):
            path = ("parallel", "fsdp", name)
            document.problem(path, f"must divide the degree ({fsdp.degree}) and be smaller; all ranks is true")


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
        message = "megatron runs in 16 bit without autocast: parameters and compute bf16"
        document.problem(("precision",), message)
