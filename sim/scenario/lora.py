"""Adapters in a scenario: the section, what fits the model, and what comes out."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from sim.model.adapters import is_trained, target_names
from sim.model.build import build_model
from sim.model.config import Lora, ModelConfig
from sim.scenario.document import Document
from sim.scenario.kinds import Count, Names, Probability
from sim.scenario.section import Section

PATH = ("model", "lora")


class LoraSection(Section):
    """LoRA: only adapters of low rank beside the named linear layers are trained. As torchtune writes it with
    implementation torchtitan, as peft with transformers, as Megatron-Bridge with megatron. (alpha scales values and
    changes neither bytes nor time.)"""

    rank: Count
    """Width of the adapters."""
    targets: Names = ("q", "v")
    """Linear layers that get one: q, k, v, o, gate, up, down, head, or attention, mlp, all (all but the head); with
    implementation megatron qkv, the three in one. Default: [q, v]."""
    dropout: Probability = 0.0
    """Probability of dropout before an adapter. Default: 0."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the adapters. Default: the parameters'; with transformers fp32, as peft makes them
    (autocast_adapter_dtype)."""
    base: Literal["nf4"] | None = None
    """Store the frozen linear layers of the blocks in four bits, as bitsandbytes' Linear4bit (QLoRA); embedding, norms
    and head stay as they are. With implementation transformers; under `fsdp` packed bytes are split as 16-bit numbers, scales
    are not split. Default: null, as the parameters."""
    double_quantization: bool = False
    """With base: nf4, store its scales in eight bits too: 0.516 instead of 0.563 bytes per weight. Default: false."""


def with_lora(
    document: Document, section: LoraSection | None, model: ModelConfig, sharded: bool, parameters: str, compute: str
) -> ModelConfig:
    """The model with its adapters, or without them where something is wrong, which is noted.

    `sharded`: under FSDP; `parameters`: the dtype of what is not quantized; `compute`: of the products.
    """
    if section is None:
        return model
    dtype = section.dtype or ("fp32" if model.implementation == "transformers" else parameters)
    fits = _fits(document, section, model, dtype if sharded else parameters, parameters)
    if not (_base_fits(document, section, model, sharded and parameters == "fp32", parameters == compute) and fits):
        return model
    splits = sharded and section.base is not None
    return replace(model, lora=Lora(**(section.model_dump() | {"dtype": dtype, "sharded": splits})))


def _base_fits(document: Document, section: LoraSection, model: ModelConfig, wide: bool, one_dtype: bool) -> bool:
    """Four bits are bitsandbytes'; FSDP2 (`wide`: of fp32 parameters) splits them as 16-bit numbers."""
    path, before = (*PATH, "base"), len(document.problems)
    if section.base is None:
        if section.double_quantization:
            document.problem((*PATH, "double_quantization"), "is for scales of base: nf4")
    elif model.implementation != "transformers":
        document.problem(path, "four-bit weights are bitsandbytes', which implementation transformers uses")
    elif wide:
        document.problem(
            path, "under fsdp four-bit weights are stored as 16-bit numbers beside others: parameters bf16"
        )
    elif not one_dtype:
        document.problem(path, "is modelled without autocast: precision.parameters and precision.compute must be equal")
    return len(document.problems) == before


def _fits(document: Document, section: LoraSection, model: ModelConfig, gathered: str, parameters: str) -> bool:
    """The code must have the layers; under FSDP2 one dtype is gathered per unit."""
    known, before = target_names(model), len(document.problems)
    if not known:
        what = (
            "adapters are written for Llama-like models of torchtitan, transformers and megatron, not"
            f" {model.implementation}'s {model.family}"
        )
        document.problem(PATH, what, show=False)
        return False
    for index, name in enumerate(section.targets):
        if name not in known:
            document.problem((*PATH, "targets", index), "", allowed=tuple(known))
    if not section.targets:
        document.problem((*PATH, "targets"), "at least one linear layer is expected", show=False)
    if model.experts is not None:
        document.problem(PATH, "adapters beside experts are not modelled", show=False)
    if model.frozen:
        document.problem(("model", "frozen"), "lora freezes everything but its adapters already")
    if "head" in section.targets and model.tied_embeddings:
        document.problem((*PATH, "targets"), "the head is the embedding here (model.tied_embeddings): leave it out")
    if gathered != parameters:
        message = f"under fsdp adapters need the parameters' dtype: {gathered} beside {parameters} is not modelled"
        document.problem((*PATH, "dtype"), message, show=False)
    return len(document.problems) == before


def check_trained(document: Document, model: ModelConfig, mode: str) -> None:
    """Patterns of frozen parameters must match some and must leave some."""
    if not model.frozen or mode != "train":
        return
    names = [name for name, _ in build_model(model).named_parameters()]
    for index, pattern in enumerate(model.frozen):
        if not any(fnmatchcase(name, pattern) for name in names):
            known = f"no parameter has such a name; the last are {', '.join(names[-3:])}"
            document.problem(("model", "frozen", index), known)
    if not any(is_trained(model, name) for name in names):
        document.problem(("model", "frozen"), "leaves nothing to train", show=False)


def check_first_stage(document: Document, model: ModelConfig, layers: int) -> None:
    """A pipeline's first stage, of so many layers, has a backward only if it trains something."""
    if not model.frozen:
        return
    network = build_model(model)
    for name, _ in network.named_parameters():
        part, _, rest = name.partition(".")
        inside = int(rest.split(".")[0]) < layers if part == "layers" else part in network.first_parts
        if inside and is_trained(model, name):
            return
    message = f"leaves the first stage ({layers} layers) nothing to train, and its output no gradient to wait for"
    document.problem(("model", "frozen"), message, show=False)
