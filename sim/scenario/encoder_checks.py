"""What networks other than causal decoders ask of a scenario: how long their sequences are, and what is not modelled."""

from __future__ import annotations

from sim.model.config import ChainConfig, ModelConfig
from sim.model.encoders import ENCODERS
from sim.scenario.checkpoint_section import CheckpointSection
from sim.scenario.document import Document
from sim.scenario.offload import OffloadSection
from sim.scenario.schema import BatchSection
from sim.scenario.sections import EXPECTED

AnyModel = ModelConfig | ChainConfig
TWO_STACKS = ("every", "save", "early_stop")
"""What of a checkpoint section speaks of two stacks of blocks alike."""


def with_lengths(document: Document, batch: BatchSection, model: AnyModel | None) -> BatchSection | None:
    """The batch with the tokens of its sequences, or None where they are missing, which is noted.

    An image's tokens follow from the model; an encoder-decoder has a second sequence.
    """
    images = isinstance(model, ModelConfig) and model.image_size > 0
    targets = isinstance(model, ModelConfig) and model.decoder_layers > 0
    if isinstance(model, ModelConfig) and images:
        tokens = model.max_positions
        if batch.seq_len not in (0, tokens):
            message = f"follows from image_size and patch_size ({tokens} tokens): leave it out"
            document.problem(("batch", "seq_len"), message)
        batch = batch.model_copy(update={"seq_len": tokens})
    elif not batch.seq_len:
        document.problem(("batch", "seq_len"), EXPECTED["missing"])
    if targets and not batch.target_len:
        document.problem(("batch", "target_len"), "is missing: the decoder's tokens per sequence")
    elif batch.target_len and not targets and model is not None:
        document.problem(("batch", "target_len"), "is for models with a decoder beside their encoder (T5)")
    return batch if batch.seq_len else None


def check_weights(document: Document, checkpoint: CheckpointSection, model: AnyModel) -> None:
    """Attention that an encoder writes out has two results, which two of the wrappers do not know."""
    if isinstance(model, ChainConfig) or model.family not in ENCODERS or model.implementation == "megatron":
        return
    if model.attention != "unfused":
        return
    for region in (checkpoint, *(choice for choice in checkpoint.layers if choice is not None)):
        if region.discard or (region.reentrant and "attention" in region.inside):
            message = (
                "attention: unfused gives its weights too, which neither discard nor a reentrant part is modelled with"
            )
            document.problem(("checkpoint",), message, show=False)
            return


def check_stacks(
    document: Document,
    checkpoint: CheckpointSection | None,
    offload: OffloadSection | None,
    model: AnyModel,
    compute: str,
) -> None:
    """Encoder and decoder are two stacks, whose blocks give several results and share the biases by distance."""
    if isinstance(model, ChainConfig) or not model.decoder_layers:
        return
    for name, field in CheckpointSection.model_fields.items():
        if checkpoint is None or name in TWO_STACKS:
            continue
        if getattr(checkpoint, name) != field.get_default(call_default_factory=True):
            message = f"with two stacks of blocks ({model.family}) only {', '.join(TWO_STACKS)} are modelled"
            document.problem(("checkpoint", name), message)
    if offload is not None and (offload.what != "saved_tensors" or offload.layers is not None):
        message = "with two stacks of blocks only what: saved_tensors over the whole forward is modelled"
        document.problem(("offload",), message, show=False)
    if compute == "fp16":
        message = (
            f"{model.family} in fp16 keeps some weights in fp32 and clamps, which is not modelled: use bf16 or fp32"
        )
        document.problem(("precision", "compute"), message)
