"""Do valid sections fit each other, the model and the cluster? Checks note problems and warnings on the document."""

from __future__ import annotations

from sim.hardware.catalogue import Cluster
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.allocator.parse import SettingsError
from sim.scenario.allocator.settings import ALLOCATOR_OFF, AllocatorSettings
from sim.scenario.checkpoint_section import CheckpointSection
from sim.scenario.checkpointing import FORMS
from sim.scenario.document import Document
from sim.scenario.families import Fsdp1Section, ZeroSection
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.schema import BatchSection, FsdpSection, OptimizerSection, ParallelSection
from sim.scenario.versions import NEWEST, OLDEST, minor_of, nearest_known
from sim.units import format_bytes

AnyModel = ModelConfig | ChainConfig

LARGEST_NEED_BYTES = 1 << 49
"""What a GPU may be asked to hold: sums stay far below 64 bits, and below memory without end."""
ROOT_RESHARDS_FROM = (2, 8)
"""PyTorch that honours an explicit reshard_after_forward of the root; 2.7.1 was seen to ignore it (FSDP.md 5)."""


def check_batch(document: Document, batch: BatchSection, model: AnyModel) -> None:
    """Sequences beyond the model's positions: impossible with learned ones, unusual with rotary ones; absurd sizes."""
    if isinstance(model, ChainConfig):
        return
    _check_need(document, batch, model)
    if batch.seq_len <= model.max_positions or model.rope == "relative":
        return
    path = ("batch", "seq_len")
    if model.rope == "none":
        document.problem(path, f"the model has {model.max_positions} learned positions (model.max_positions)")
    else:
        document.warning(path, f"the model was made for {model.max_positions} positions")


def _check_need(document: Document, batch: BatchSection, model: ModelConfig) -> None:
    """Bytes of all states and all activations, roughly: a slip of the keyboard is told before the numbers overflow."""
    layer = model.hidden * (2 * model.heads * model.head_dim + 3 * model.ffn_hidden)
    states = 16 * (model.layers * layer + 2 * model.vocab * model.hidden)
    tokens = batch.micro_batch * batch.seq_len
    width = 8 * (model.hidden + model.heads * model.head_dim) + 4 * model.ffn_hidden
    scores = 3 * model.heads * batch.seq_len if model.attention != "sdpa" else 0
    activations = 4 * tokens * (model.layers * (width + scores) + 4 * model.vocab)
    for path, need in (("model", states), ("batch", activations)):
        if need > LARGEST_NEED_BYTES:
            message = f"needs about {format_bytes(need)}, more than anything that can be simulated"
            document.problem((path,), message, show=False)


def check_loss_chunks(document: Document, parallel: ParallelSection, model: AnyModel) -> None:
    """A backward per chunk is modelled where nothing else acts on a micro-batch's one backward: on one GPU."""
    if isinstance(model, ChainConfig) or model.loss_chunks == 1 or model.loss_chunking != "backward":
        return
    for name in ("fsdp", "fsdp1", "ddp", "zero", "pipeline"):
        if getattr(parallel, name) is not None:
            message = f"a backward per chunk is modelled on one GPU only: under {name} use projection (or logits)"
            document.problem(("model", "loss_chunking"), message)


def check_fsdp(document: Document, fsdp: FsdpSection, model: AnyModel | None, version: str | None) -> None:
    """Resharding to fewer ranks needs a divisor of the degree, and neither 1 nor all (PyTorch's fully_shard)."""
    for name in ("reshard_after_forward", "root_reshard_after_forward"):
        ranks = getattr(fsdp, name)
        if type(ranks) is int and (fsdp.degree % ranks or ranks == fsdp.degree):
            path = ("parallel", "fsdp", name)
            document.problem(path, f"must divide the degree ({fsdp.degree}) and be smaller; all ranks is true")
    if fsdp.units == "torchtitan_2026":
        _check_titan_units(document, fsdp, model)
    elif fsdp.root_reshard_after_forward and version and minor_of(version) < ROOT_RESHARDS_FROM:
        path = ("parallel", "fsdp", "root_reshard_after_forward")
        document.warning(path, f"is ignored by PyTorch {version}: an effect is seen from 2.8 on")


def _check_titan_units(document: Document, fsdp: FsdpSection, model: AnyModel | None) -> None:
    """Its units wrap torchtitan's own modules, and its root holds no parameters."""
    path = ("parallel", "fsdp", "units")
    if isinstance(model, ChainConfig) or (model is not None and model.implementation != "torchtitan"):
        of = "a chain has no" if isinstance(model, ChainConfig) else f"{model.implementation} has no"
        document.problem(path, f"is a layout of torchtitan's Llama: {of} such modules; use blocks")
    elif model is not None and model.tied_embeddings:
        document.problem(path, "wraps embedding and head apart, but model.tied_embeddings makes them one; use blocks")
    if fsdp.root_reshard_after_forward is not None:
        path = ("parallel", "fsdp", "root_reshard_after_forward")
        document.problem(path, "with units: torchtitan_2026 the root holds no parameters of its own")


def check_version(document: Document, version: str) -> None:
    """Versions that nobody has looked at are played by the rules of the nearest one."""
    if not OLDEST <= minor_of(version) <= NEWEST:
        document.warning(("torch",), f"is not known: the rules of {nearest_known(version)}, the nearest, are used")


def check_mode(document: Document, mode: str, checkpoint: CheckpointSection | None, model: AnyModel | None) -> None:
    """Checkpointing saves what autograd would save, and under no_grad that is nothing."""
    if mode != "train" and isinstance(model, ChainConfig):
        document.problem(("mode",), "a chain is only trained")
    if mode == "no_grad" and checkpoint is not None:
        document.warning(("checkpoint",), "has no effect under no_grad: nothing is saved, nothing recomputed")


def check_under_pipeline(
    document: Document, checkpoint: CheckpointSection | None, optimizer: OptimizerSection | None, mode: str
) -> None:
    """What is modelled for whole models on one rank only."""
    only = "is modelled without a pipeline only"
    for form in FORMS:
        if checkpoint is not None and getattr(checkpoint, form):
            document.problem(("checkpoint", form), f"{only}: a stage has layers of its own")
    for name in ("in_backward", "master_weights", "fp32_gradients"):
        if optimizer is not None and getattr(optimizer, name):
            document.problem(("optimizer", name), only, show=False)
    if mode != "train":
        document.problem(("mode",), only)


def check_grad_scaler(
    document: Document,
    precision: PrecisionSection,
    parallel: ParallelSection,
    optimizer: OptimizerSection | None,
    mode: str,
) -> None:
    """It divides fp32 gradients of whole parameters, between backward and the step."""
    path = ("precision", "grad_scaler")
    if not precision.grad_scaler:
        return
    if precision.compute != "fp16" or precision.parameters != "fp32" or precision.autocast is False:
        document.problem(
            path, "is for fp16 autocast: parameters: fp32, compute: fp16 (fp16 gradients cannot be unscaled)"
        )
    taken = [
        n
        for n in ("fsdp", "fsdp1", "zero", "tensor", "data", "context", "pipeline")
        if getattr(parallel, n) is not None
    ]
    for name in taken:
        document.problem(path, f"is modelled on one GPU and under ddp only, not with parallel.{name}")
    if optimizer is None or mode != "train":
        document.problem(path, "without an optimizer's step there is nothing to check gradients for")
        return
    for name in ("in_backward", "master_weights", "offload"):
        if getattr(optimizer, name):
            document.problem(path, f"is not modelled with optimizer.{name}")
    if optimizer.name == "adamw-8bit":
        document.problem(path, "is not modelled with optimizer.name adamw-8bit")


def check_precision(
    document: Document, precision: PrecisionSection, fsdp: FsdpSection | Fsdp1Section | ZeroSection | None, cluster: Cluster,
    model: AnyModel | None,
) -> None:  # fmt: skip
    """Something must cast: FSDP's policy, autocast, or parameters that already have the compute dtype."""
    path = ("precision", "autocast")
    if precision.autocast and precision.compute == "fp32":
        document.problem(path, "autocast computes in bf16 or fp16, but precision.compute is fp32")
    if fsdp is None and precision.autocast is False and precision.compute != precision.parameters:
        dtypes = f"parameters in {precision.parameters} and compute in {precision.compute}"
        document.problem(path, f"on one GPU nothing else casts: {dtypes} need autocast: true")
    if isinstance(model, ModelConfig) and model.implementation == "megatron":
        _check_megatron_precision(document, precision, fsdp)
    elif isinstance(model, ModelConfig) and model.experts is not None:
        _check_grouped_precision(document, precision, fsdp is None)
    possible = [dtype for dtype in ("bf16", "fp16", "fp32") if dtype in dict(cluster.gpu.peaks)]
    if precision.compute not in possible:
        message = f"{cluster.gpu.title} has no {precision.compute} matrix units: use {' or '.join(possible)}"
        document.problem(("precision", "compute"), message)


def _check_grouped_precision(document: Document, precision: PrecisionSection, alone: bool) -> None:
    """transformers' experts run torch's grouped product, which autocast does not know."""
    if precision.autocast or precision.compute != "bf16" or (alone and precision.parameters != "bf16"):
        message = "grouped products of experts run in bf16 without autocast: parameters bf16, or fsdp that casts"
        document.problem(("precision",), message)


def check_allocator(document: Document, text: str, version: str) -> None:
    """The text must be one that this PyTorch takes in PYTORCH_CUDA_ALLOC_CONF, or "off"."""
    if text == ALLOCATOR_OFF:
        return
    try:
        AllocatorSettings.parse(text, version)
    except SettingsError as error:
        for problem in error.problems:
            document.problem(("allocator",), str(problem), show=False)


def _check_megatron_precision(
    document: Document, precision: PrecisionSection, fsdp: FsdpSection | Fsdp1Section | ZeroSection | None
) -> None:
    """Megatron's own layers run in 16 bit: its masked softmax knows no other dtype, and it does not use autocast."""
    computes_16_bit = precision.compute in ("bf16", "fp16")
    if precision.autocast or not computes_16_bit or (fsdp is None and precision.parameters != precision.compute):
        message = "megatron runs in 16 bit without autocast: parameters and compute bf16 (or both fp16)"
        document.problem(("precision",), message)
