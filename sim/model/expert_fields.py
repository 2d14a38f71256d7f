"""Experts and latent attention out of plain fields: a preset's, a config.json's, and what a scenario changes of them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from sim.model.experts import Experts, LatentAttention
from sim.model.faults import Fault
from sim.model.layer_kinds import megatrons_needs, needs_megatron

Fields = dict[str, Any]
KINDS: dict[str, type[Experts] | type[LatentAttention]] = {"experts": Experts, "latent": LatentAttention}
WRITTEN_BY: dict[str, tuple[str, ...]] = {"experts": ("transformers", "megatron"), "latent": ("megatron",)}
"""Whose code of them is imitated."""
FAMILIES: dict[str, tuple[str, ...]] = {"experts": ("llama", "gpt"), "latent": ("llama",)}
"""Of which models; transformers' experts are those of Llama-like ones."""
NEEDS = {"experts": "experts", "latent": "latent attention"}


def merged(shapes: Fields, overrides: Fields) -> Fields:
    """Overrides over shapes; experts and latent attention field by field."""
    values = {**shapes, **overrides}
    for name in KINDS:
        parts = [fields for fields in (shapes.get(name), overrides.get(name)) if fields is not None]
        if parts:
            values[name] = {key: value for part in parts for key, value in part.items()}
    return values


MEGATRONS: dict[str, Any] = {
    "scores": "softmax", "scaling": None, "groups": 1, "selection_bias": False, "auxiliary_loss": False,
    "capacity_factor": None, "permute_fusion": True, "router_dtype": "fp32", "dispatcher": "alltoall", "grouped": True,
    "sinkhorn": False, "bias": False, "clamped": False, "every": 1,
}  # fmt: skip
"""What only Megatron's experts have; transformers' are those of Mixtral, Qwen2-MoE and Qwen3-MoE."""


def check_nested(values: Fields, family: str, code: str) -> list[Fault]:
    """What is missing or does not fit. Counts are whole numbers of at least 1 already."""
    faults = []
    for name, kind in KINDS.items():
        given = values.get(name)
        if given is None:
            continue
        needed = [field.name for field in fields(kind) if field.default is MISSING]
        faults += [Fault(f"{name}.{field}", None, "is needed") for field in needed if field not in given]
        if family not in FAMILIES[name]:
            faults.append(Fault(name, "", f"the {family} family has none"))
    if not faults and values.get("experts") is not None:
        faults += _check_experts(Experts(**values["experts"]), values)
        if code == "transformers":
            faults += [
                Fault(f"experts.{name}", values["experts"][name], "is Megatron's: transformers' experts have it not")
                for name, plain in MEGATRONS.items()
                if values["experts"].get(name, plain) != plain
            ]
    latent = values.get("latent")
    if latent is not None and latent.get("rope_head_dim", 64) % 2:
        faults.append(
            Fault("latent.rope_head_dim", latent["rope_head_dim"], "must be even: rotary positions turn pairs")
        )
    return faults


def _check_experts(experts: Experts, values: Fields) -> list[Fault]:
    e, faults = experts, []

    def fault(field: str, message: str) -> None:
        faults.append(Fault(f"experts.{field}", getattr(e, field), message))

    if values.get("bias"):
        faults.append(Fault("bias", True, "experts have no biases here: false is expected"))
    if e.top_k > e.count:
        fault("top_k", f"must be at most the number of experts ({e.count})")
    if e.dense_layers > values["layers"]:
        fault("dense_layers", f"must be at most the number of layers ({values['layers']})")
    if e.every > values["layers"]:
        fault("every", f"no layer would have experts: at most the number of layers ({values['layers']})")
    if e.count % e.groups:
        fault("groups", f"must divide the number of experts ({e.count})")
    elif e.groups > 1 and (e.groups_top > e.groups or e.top_k % e.groups_top):
        fault("groups_top", f"must be at most the number of groups ({e.groups}) and divide top_k ({e.top_k})")
    if e.scores == "softmax" and e.selection_bias:
        fault("selection_bias", "goes with scores: sigmoid")
    if e.sinkhorn and (e.auxiliary_loss or e.selection_bias or e.groups > 1):
        fault("sinkhorn", "goes without auxiliary_loss, selection_bias and groups")
    if e.top_k == 1 and e.scores == "softmax" and not e.scores_first and not e.sinkhorn:
        fault("scores_first", "with top_k 1 softmax over the chosen expert alone is always 1: true is expected")
    if e.dispatcher == "flex" and e.capacity_factor is not None:
        fault("dispatcher", "flex is modelled without capacity_factor")
    if e.shared_gate and not e.shared_ffn_hidden:
        fault("shared_gate", "there is no shared expert: give shared_ffn_hidden")
    if e.top_k <= e.count and not 1 <= e.imbalance <= e.most_imbalance():
        fault("imbalance", f"from 1 (balanced) to {e.most_imbalance():g} (every token goes to the busiest expert)")
    return faults


def completed(values: Fields) -> Fields:
    """Fields of ModelConfig, with objects in the place of nested fields."""
    objects = {name: kind(**values[name]) for name, kind in KINDS.items() if values.get(name) is not None}
    return {**values, **objects}


def unwritten(values: Fields) -> list[str]:
    """The fields that only some implementations have, of those given."""
    found = [name for name in WRITTEN_BY if values.get(name) is not None]
    return found or [name for name in ("window", "activation") if values.get(name)]


def only_some(values: Fields) -> list[str]:
    """What a model needs that only some implementations have, as a message says it."""
    return [NEEDS[name] for name in WRITTEN_BY if values.get(name) is not None] + megatrons_needs(values)


def written_by(values: Fields, known: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of the implementations known, those that have what the model needs."""
    needed = [codes for name, codes in WRITTEN_BY.items() if values.get(name) is not None]
    if needs_megatron(values) or (values.get("experts") is not None and values.get("family") == "gpt"):
        needed.append(("megatron",))
    return tuple(code for code in known if all(code in codes for codes in needed))
