"""Does a checkpoint section fit the model? Its regions must exist, its forms exclude each other, its names be known."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod

from sim.model.config import ChainConfig, ModelConfig
from sim.model.operators import block_operators, products
from sim.model.parts import discardable_of, parts_of
from sim.scenario.checkpoint_section import CheckpointSection, RegionSection
from sim.scenario.document import Document, Path

AnyModel = ModelConfig | ChainConfig

LINEAR_PRODUCTS = ("aten.mm", "aten.addmm")
SAVE_NAMES = ("attention", "every_second_matmul")
ATEN_NAMES = (
    *LINEAR_PRODUCTS,
    "aten.bmm",
    "aten.baddbmm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._fused_rms_norm",
    "aten.native_layer_norm",
    "aten.native_dropout",
    "aten._safe_softmax",
    "aten._softmax",
    "aten._log_softmax",
    "aten.embedding",
    "aten.silu",
    "aten.gelu",
    "aten.tanh",
    "aten.relu",
    "aten.add",
    "aten.mul",
    "aten.pow",
    "aten.mean",
    "aten.rsqrt",
    "aten.neg",
    "aten.cat",
    "aten.clone",
    "aten._to_copy",
)
"""Operators that the modelled transformers run in a block, as a selective policy sees them."""


FORMS = ("sequential", "nested", "boundaries", "layers")
"""Fields that each decide the regions alone."""
CHOOSERS = ("every", "segment", "first")
"""Fields that decide the regions together."""


def check_checkpoint(document: Document, checkpoint: CheckpointSection, model: AnyModel, compute: str) -> None:
    """Notes what cannot be and what has no effect; `compute` is the dtype of the products."""
    given = [name for name in FORMS if getattr(checkpoint, name)]
    given += [name for name in CHOOSERS if getattr(checkpoint, name) != CheckpointSection.model_fields[name].default]
    for name in given[1:]:
        if given[0] in FORMS:
            document.problem(("checkpoint", name), f"the regions are given by {given[0]} already")
    if given and given[0] in FORMS:
        _check_form(document, checkpoint, given[0], model.layers)
    else:
        _check_segments(document, checkpoint, model.layers)
    _check_region(document, ("checkpoint",), checkpoint, model, compute)
    if not (checkpoint.inside or checkpoint.discard):
        return
    for name in given:
        if name not in ("every", "first"):
            what = "discard" if checkpoint.discard else "inside"
            document.problem(("checkpoint", name), f"regions inside a layer ({what}) do not go with it")


def _check_segments(document: Document, checkpoint: CheckpointSection, layers: int) -> None:
    if checkpoint.first is not None and checkpoint.first > layers:
        document.problem(("checkpoint", "first"), f"must be at most the number of layers ({layers})")
    covered = min(checkpoint.first or layers, layers)
    regions = covered // checkpoint.segment
    if regions == 0:
        document.problem(("checkpoint", "segment"), f"must be at most the number of layers to checkpoint ({covered})")
    elif checkpoint.every > regions:
        document.problem(("checkpoint", "every"), f"must be at most the number of regions ({regions})")


def _check_form(document: Document, checkpoint: CheckpointSection, form: str, layers: int) -> None:
    path: Path = ("checkpoint", form)
    if form == "sequential" and checkpoint.sequential is not None:
        if checkpoint.sequential > layers:
            document.problem(path, f"must be at most the number of layers ({layers})")
        elif checkpoint.sequential == 1:
            document.warning(path, "the last segment is not checkpointed, and there is no other: nothing is recomputed")
    elif form == "nested" and prod(checkpoint.nested) > layers:
        document.problem(path, f"{prod(checkpoint.nested)} innermost regions, but only {layers} layers")
    elif form == "boundaries":
        if list(checkpoint.boundaries) != sorted(set(checkpoint.boundaries)):
            document.problem(path, "layers in rising order are expected")
        elif checkpoint.boundaries[-1] >= layers:
            document.problem(path, f"the last layer is {layers - 1}")
    elif form == "layers" and layers % len(checkpoint.layers):
        document.problem(path, f"{len(checkpoint.layers)} choices do not go evenly into {layers} layers", show=False)
    _check_layers(document, checkpoint)


def _check_layers(document: Document, checkpoint: CheckpointSection) -> None:
    """Choices per layer leave nothing for the whole section to say."""
    if not checkpoint.layers:
        return
    for name in RegionSection.model_fields:
        if getattr(checkpoint, name) != RegionSection.model_fields[name].default:
            document.problem(("checkpoint", name), "with layers, each layer says this for itself")


def _check_region(document: Document, path: Path, region: RegionSection, model: AnyModel, compute: str) -> None:
    _check_names(document, (*path, "save"), region, model, compute)
    _check_parts(document, path, region, model)
    if region.reentrant and region.save:
        document.problem(
            (*path, "save"), "a reentrant region keeps no outputs (use_reentrant=True takes no context_fn)"
        )
    if region.reentrant and not region.early_stop:
        document.warning((*path, "early_stop"), "has no effect: a reentrant region never stops early")
    if region.reentrant and isinstance(model, ModelConfig) and _first_input_is_frozen(model):
        message = "the embedding is frozen, so that no region's input needs a gradient: the layers would not be trained"
        if model.lora is not None:
            document.problem((*path, "reentrant"), f"{message}; set model.input_gradients: true")
        else:
            document.warning((*path, "reentrant"), message)
    if isinstance(region, CheckpointSection):
        for number, choice in enumerate(region.layers):
            if choice is not None:
                _check_region(document, (*path, "layers", number), choice, model, compute)


def _first_input_is_frozen(model: ModelConfig) -> bool:
    """Llama's layers get the token embedding alone; a GPT adds positions."""
    if model.input_gradients or model.lora is not None:
        return not model.input_gradients
    embeddings = ("tok_embeddings.weight", "embed_tokens.weight")
    return model.family == "llama" and any(fnmatchcase(e, pattern) for e in embeddings for pattern in model.frozen)


def _check_names(document: Document, path: Path, region: RegionSection, model: AnyModel, compute: str) -> None:
    if region.save and isinstance(model, ChainConfig):
        document.problem(path, "a chain has no operators to save")
        return
    for index, name in enumerate(region.save):
        if name not in SAVE_NAMES and name.removesuffix(".default") not in ATEN_NAMES:
            document.problem((*path, index), "", allowed=SAVE_NAMES + ATEN_NAMES)
    if isinstance(model, ModelConfig):
        _check_operators(document, path, region, model, compute)


def _check_operators(document: Document, path: Path, region: RegionSection, model: ModelConfig, compute: str) -> None:
    """What is saved must occur. A linear layer with a bias runs aten.addmm, which a policy about aten.mm does not see."""
    names = [name.removesuffix(".default") for name in region.save]
    occurring = block_operators(model, compute)
    covered = bool(products(model) & set(names))  # [aten.mm, aten.addmm] is right for any model
    biased = "aten.addmm" in products(model) and "aten.addmm" not in names
    layers = "the linear layers" if model.bias else "the q, k and v projections"
    for index, name in enumerate(names):
        if biased and name in ("every_second_matmul", "aten.mm"):
            message = f"{layers} have biases and run aten.addmm, which this does not save: use aten.addmm"
            document.warning((*path, index), message)
        elif name in ATEN_NAMES and name not in occurring and not (covered and name in LINEAR_PRODUCTS):
            document.warning((*path, index), "does not occur in the layers of this model: nothing is saved by it")
        elif name == "attention" and model.attention != "sdpa":
            message = f"with attention: {model.attention} no fused attention occurs: nothing is saved by it"
            document.warning((*path, index), message)


def _check_parts(document: Document, path: Path, region: RegionSection, model: AnyModel) -> None:
    """Parts must exist in the imitated code; a region around a norm saves next to nothing."""
    known = {"inside": (), "discard": ()} if isinstance(model, ChainConfig) else {
        "inside": tuple(parts_of(model)), "discard": tuple(discardable_of(model))
    }  # fmt: skip
    for field, names in known.items():
        for name in dict.fromkeys(getattr(region, field)):
            if name in names:
                continue
            if names:
                document.problem((*path, field), f"{name}:", show=False, allowed=names)
            else:
                whose = "a chain's layers" if isinstance(model, ChainConfig) else f"{model.implementation}'s blocks"
                document.problem((*path, field), f"{whose} are one function each: nothing inside can be wrapped")
    if set(region.inside) == {"norm"}:
        message = "the norm's output is saved by what reads it, so that this saves next to nothing: see discard"
        document.warning((*path, "inside"), message)
    within = {"mlp", "moe"} & set(region.inside)
    if "activation" in region.discard and within:
        message = (
            f"the activation is made again with the whole {within.pop()}, which inside names: leave one of them out"
        )
        document.problem((*path, "discard"), message)
    if region.inside and region.save:
        document.problem((*path, "save"), "with regions inside a layer, name what is recomputed (inside) only")
