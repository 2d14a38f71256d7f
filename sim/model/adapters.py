"""LoRA: linear layers with a trained detour of low rank, as torchtune, peft and Megatron-Bridge write them; everything
else is frozen.

W [out, in] frozen, A [rank, in] and B [out, rank] trained: y = x W^T + scale * (dropout(x) A^T) B^T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.config import Lora, ModelConfig
from sim.model.language_model import LanguageModel, Linear
from sim.model.module import Module
from sim.model.quantized import Linear4bit
from sim.model.shard.tensor import ColumnParallelLinear

LINEARS: dict[tuple[str, str], dict[str, str]] = {
    ("llama", "torchtitan"): {
        "q": "wq", "k": "wk", "v": "wv", "o": "wo", "gate": "w1", "up": "w3", "down": "w2", "head": "output",
    },
    ("llama", "transformers"): {
        "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
        "down": "down_proj", "head": "lm_head",
    },
    ("llama", "megatron"): {"qkv": "linear_qkv"},
}  # fmt: skip
"""Which linear layers may have adapters, and what each implementation calls them."""
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
    "all": ("q", "k", "v", "o", "gate", "up", "down"),
}
"""Names for several; the head is in none, as in peft's all-linear."""
SCALE = 2.0
"""alpha / rank: its value changes neither time nor memory."""


class LoraLinear(Module):
    """torchtune's LoRALinear: it holds the base weight itself, beside two linear layers."""

    def __init__(self, base: Linear, lora: Lora) -> None:
        outputs, inputs = base.weight.shape
        self.weight, self.bias = base.weight, base.bias
        self.dropout = lora.dropout
        self.lora_a, self.lora_b = Linear(inputs, lora.rank), Linear(lora.rank, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        lora_out = self.lora_a(F.dropout(x, self.dropout))
        lora_out = SCALE * self.lora_b(lora_out)
        return out + lora_out


class PeftLinear(Module):
    """peft's lora.Linear around a linear layer; adapters in a dtype of their own get a cast of the input."""

    def __init__(self, base: Linear, lora: Lora) -> None:
        outputs, inputs = base.weight.shape
        self.base_layer: Module = base
        self.dropout = lora.dropout
        self.lora_a, self.lora_b = Linear(inputs, lora.rank), Linear(lora.rank, outputs)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.adapter_dtype(x))
        result = result + self.lora_b(self.lora_a(F.dropout(x, self.dropout))) * SCALE
        return result.to(dtype)

    def adapter_dtype(self, x: Tensor) -> str:
        """What the input is cast to."""
        weight = self.lora_a.weight.tensor
        return x.dtype if weight is None else weight.dtype


class PeftLinear4bit(PeftLinear):
    """peft's lora.Linear4bit: the base's result is cloned, and the detour comes back in its dtype (without autocast)."""

    def __init__(self, base: Linear, lora: Lora) -> None:
        super().__init__(base, lora)
        self.base_layer = Linear4bit(base.weight, lora.double_quantization, lora.sharded)

    def forward(self, x: Tensor) -> Tensor:
        result = F.clone(self.base_layer(x))
        x = x.to(self.adapter_dtype(x))
        output = self.lora_b(self.lora_a(F.dropout(x, self.dropout))) * SCALE
        output = output.to(result.dtype)
        return result + output


class ParallelAdapter(Module):
    """Megatron-Bridge's LoRALinear around a column-parallel layer: both of the detour's matrices are column-parallel, and
    what comes between them is gathered. It reads the norm's output in the compute dtype."""

    def __init__(self, base: ColumnParallelLinear, lora: Lora) -> None:
        (outputs, inputs), parallel = base.weight.shape, base.parallel
        self.to_wrap, self.dropout, self.ranks = base, lora.dropout, parallel.degree
        self.lora_a = ColumnParallelLinear(inputs, lora.rank, parallel, bias=False)
        self.lora_b = ColumnParallelLinear(
            lora.rank, outputs * parallel.degree, replace(parallel, sequence_parallel=False), bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.to_wrap(x)
        detour = self.lora_a(F.dropout(x, self.dropout))
        if self.ranks > 1:
            detour = F.gather_widths(detour, self.ranks)
        detour = SCALE * self.lora_b(detour)
        return out + detour


Adapted = LoraLinear | PeftLinear | ParallelAdapter
WRAPPERS: dict[tuple[str, str | None], Callable[[Any, Lora], Adapted]] = {
    ("megatron", None): ParallelAdapter,
    ("torchtitan", None): LoraLinear,
    ("transformers", None): PeftLinear,
    ("transformers", "nf4"): PeftLinear4bit,
}
"""By implementation and storage of the base."""


def target_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """What `Lora.targets` may say of this model, and the linear layers that are meant; empty: no adapters are written."""
    known = LINEARS.get((config.family, config.implementation), {})
    groups = {
        name: tuple(known[part] for part in parts) for name, parts in GROUPS.items() if all(p in known for p in parts)
    }
    return {name: (attribute,) for name, attribute in known.items()} | groups


def add_adapters(model: LanguageModel, config: ModelConfig) -> None:
    """Put adapters around the linear layers that `config.lora` names, and quantize the others where it says so."""
    lora = config.lora
    if lora is None:
        return
    names = target_names(config)
    wrapped = {attribute for target in lora.targets for attribute in names[target]}
    quantized = set(names["all"]) if lora.base is not None else set()
    _wrap(model, config, lora, wrapped, quantized)
    model.name_paths()


def _wrap(module: Module, config: ModelConfig, lora: Lora, wrapped: set[str], quantized: set[str]) -> None:
    for name, child in list(module.children()):
        if isinstance(child, Linear | ColumnParallelLinear) and name in wrapped:
            base = lora.base if name in quantized else None
            adapted = WRAPPERS[config.implementation, base](child, lora)
            for adapter in (adapted.lora_a, adapted.lora_b):
                adapter.weight.dtype = lora.dtype
            setattr(module, name, adapted)
        elif isinstance(child, Linear) and name in quantized:
            setattr(module, name, Linear4bit(child.weight, lora.double_quantization, lora.sharded))
        else:
            _wrap(child, config, lora, wrapped, quantized)


def is_trained(config: ModelConfig, name: str) -> bool:
    """Does the parameter of this name get a gradient?"""
    if config.lora is not None:
        return ".lora_" in name
    return not any(fnmatchcase(name, pattern) for pattern in config.frozen)
