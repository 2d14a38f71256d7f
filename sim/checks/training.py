"""What a published run trains and with which optimizer: words of a row, as fields of a scenario."""

from __future__ import annotations

import re
from typing import Any

from sim.checks.facts import Facts, arguments
from sim.checks.software import software_of

LORA = r"(?<![a-z])q?lora"
PREFIX_ADAPTER = r"finetune_adapter|llama-?adapter"
FOUR_BIT = r"\bnf4\b|qlora"
SGD = r"\bsgd\b|\blomo\b"
IN_BACKWARD = r"\blomo\b|in.?(bwd|backward)"
EIGHT_BIT_ADAM = r"(?<!paged )8-?bit"
OTHER = r"4-?bit|\bmuon\b|adafactor|\blion\b|paged"


def has_lora(facts: Facts) -> bool:
    """Adapters of low rank, by the model's name or the notes."""
    return facts.says("model_name", LORA) or facts.says("notes", LORA)


def is_four_bit(facts: Facts) -> bool:
    """A quantized base beside adapters."""
    return has_lora(facts) and any(facts.says(column, FOUR_BIT) for column in ("precision", "notes", "model_name"))


def lora(facts: Facts) -> dict[str, Any]:
    """Rank and layers as the row says them, else the software's recipe; adapters in the dtype of the parameters."""
    name, software = facts.text.get("model_name", ""), software_of(facts)
    rank, targets = software.lora
    if (printed := re.search(r"\br(\d+)\b", name)) is not None:
        rank = int(printed[1])
    if re.search(r"\ball\b", name):
        targets = ("all",)
    label = facts.text.get("precision", "")
    dtype = "fp16" if re.search("fp16", label) and not re.search("bf16", label) else "bf16"
    section: dict[str, Any] = {"rank": rank, "targets": list(targets), "dtype": dtype}
    if is_four_bit(facts):
        double = not facts.says("precision", r"nf4(?!-dq)")  # torchtune's NF4 always quantizes its scales
        section |= {"base": "nf4", "double_quantization": double}
    return section


def on_one_gpu(facts: Facts) -> bool:
    """torchtune's recipes for whole models on one GPU (*_full_single_device.yaml): 8-bit AdamW, stepped in backward."""
    return software_of(facts).name == "torchtune" and facts.num_gpus == 1 and not has_lora(facts)


def steps_in_backward(facts: Facts) -> bool:
    """As the notes say, or the software's recipe."""
    return facts.says("notes", IN_BACKWARD) or on_one_gpu(facts)


def optimizer_name(facts: Facts) -> str | None:
    """The schema's name of an optimizer other than AdamW; None: AdamW."""
    if facts.says("notes", SGD):
        return "sgd"
    if on_one_gpu(facts):
        return "adamw-8bit"
    return "adamw-8bit" if facts.says("notes", EIGHT_BIT_ADAM) and not has_lora(facts) else None


def loss_fusion(facts: Facts) -> str:
    """The schema's name of Megatron's fusion of the loss: by its arguments where they are printed, else by the recipes."""
    given = arguments(facts)
    if given.get("cross-entropy-loss-fusion"):
        return str(given.get("cross-entropy-fusion-impl", "native"))
    return "none" if given else software_of(facts).loss_fusion
