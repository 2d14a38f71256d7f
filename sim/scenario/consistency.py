"""Do valid sections fit each other, the model and the cluster? Checks note problems and warnings on the document."""

from __future__ import annotations

from typing import Literal

from sim.hardware.catalogue import Cluster
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.allocator.parse import SettingsError
from sim.scenario.allocator.settings import AllocatorSettings
from sim.scenario.document import Document
from sim.scenario.schema import BatchSection, CheckpointSection, FsdpSection, OffloadSection, PrecisionSection

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


def check_offload(
    document: Document, offload: OffloadSection, checkpoint: CheckpointSection | None, model: AnyModel
) -> None:
    """What leaves must exist, and what is said about side streams needs them."""
    if isinstance(model, ChainConfig):
        document.problem(("offload",), "a chain has no tensors to offload", show=False)
        return
    if offload.what == "checkpoint_inputs" and checkpoint is None:
        document.problem(("offload", "what"), "nothing is checkpointed: add checkpoint: {}, or offload activations")
    if isinstance(offload.layers, tuple) and (beyond := [n for n in offload.layers if n >= model.layers]):
        document.problem(("offload", "layers", offload.layers.index(beyond[0])), f"layers are 0 to {model.layers - 1}")
    _check_offload_streams(document, offload)


def _check_offload_streams(document: Document, offload: OffloadSection) -> None:
    side = offload_streams(offload) == "side"
    if offload.what == "saved_tensors" and side:
        document.problem(("offload", "streams"), "save_on_cpu copies in the compute stream: use what: activations")
    if offload.what == "activations" and not side:
        document.problem(("offload", "streams"), "activations leave on side streams: use what: saved_tensors")
    if side and not offload.pinned:
        document.problem(("offload", "pinned"), "pageable copies hold up the host: side streams need pinned memory")
    if not offload.pinned and offload.pinned_pool and "pinned_pool" in offload.model_fields_set:
        document.problem(("offload", "pinned_pool"), "there is no pinned memory to keep: pinned is false")
    for name in ("look_ahead", "in_flight", "above"):
        if getattr(offload, name) is not None and not side:
            document.problem(("offload", name), "needs streams: side")


def offload_streams(offload: OffloadSection) -> Literal["compute", "side"]:
    """Where copies run, if the section does not say."""
    return offload.streams or ("side" if offload.what == "activations" else "compute")


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
