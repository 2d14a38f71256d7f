"""What a published row says of experts: their number and shape, how ranks share them, which of their parts recompute."""

from __future__ import annotations

import re
from typing import Any

from sim.checks.facts import Facts, arguments, whole
from sim.checks.recipes import recipe_of
from sim.model.catalogue import preset_names, preset_shapes

NAMES = (
    r"\bmoe\b|moe[:_]|mixtral|deepseek|moonlight|gpt.?oss|kimi|grok|maverick|scout|megablocks"
    r"|\ba\d+b\b|_a\d+b|-a\d+b"
)
"""Words of a model's name that mean experts."""


def has_experts(facts: Facts) -> bool:
    return facts.says("model_name", NAMES) or facts.text.get("experts", "") not in ("", "0", "1")


def preset_of(facts: Facts) -> str | None:
    """The preset whose name the model's name begins with, letters and digits compared only."""
    name = re.sub(r"[^a-z0-9]", "", facts.text.get("model_name", "").lower())
    matches = [preset for preset in preset_names() if name.startswith(re.sub(r"[^a-z0-9]", "", preset))]
    return max(matches, key=len, default=None)


def experts_of(facts: Facts) -> dict[str, Any]:
    """Fields of model.experts as the row prints them, over those of the preset of that name."""
    printed = {"count": "experts", "top_k": "moe_topk", "ffn_hidden": "moe_ffn_hidden"}
    fields: dict[str, Any] = {
        name: value for name, column in printed.items() if (value := whole(facts.text.get(column, "")))
    }
    if fields and "ffn_hidden" not in fields and facts.ffn_hidden is not None:
        fields["ffn_hidden"] = facts.ffn_hidden
    if recipe_of(facts).flex:
        fields["dispatcher"] = "flex"
    if recipe_of(facts).fused_experts:
        fields |= {"bias": False, "clamped": False}
    return fields | _of_arguments(facts)


def latent_of(facts: Facts) -> dict[str, Any]:
    """Fields of model.latent out of a Megatron argument list; Megatron's defaults for what it leaves out."""
    given = arguments(facts)
    if not given or not facts.says("mla", "^yes"):
        return {}
    return {
        "kv_rank": int(given.get("kv-lora-rank", 32)),
        "q_rank": int(given.get("q-lora-rank", 512) or 0),
        "rope_head_dim": int(given.get("qk-pos-emb-head-dim", 64)),
        "value_head_dim": int(given.get("v-head-dim", 128)),
    }


def uses_latent_attention(facts: Facts) -> bool:
    """Printed as such; presets say it themselves."""
    return facts.says("mla", "^yes")


def unprinted_experts(facts: Facts) -> list[str]:
    """Experts that neither the row nor a preset describes."""
    if not has_experts(facts) or {"count", "top_k", "ffn_hidden"} <= experts_of(facts).keys():
        return []
    preset = preset_of(facts)
    known = preset is not None and "experts" in preset_shapes(preset)
    return [] if known else ["the experts' number and shape are not printed"]


def _of_arguments(facts: Facts) -> dict[str, Any]:
    given = arguments(facts)
    if not any(name.startswith("moe-") for name in given):
        return {}
    fields: dict[str, Any] = {
        "scores": given.get("moe-router-score-function", "softmax"),
        "scores_first": bool(given.get("moe-router-pre-softmax")),
        "selection_bias": bool(given.get("moe-router-enable-expert-bias")),
        "permute_fusion": bool(given.get("moe-permute-fusion")),
        "dispatcher": "allgather" if given.get("moe-token-dispatcher-type", "allgather") == "allgather" else "alltoall",
        "grouped": bool(given.get("moe-grouped-gemm")),
        "sinkhorn": given.get("moe-router-load-balancing-type") == "sinkhorn",
        "router_dtype": "fp32" if given.get("moe-router-dtype") == "fp32" else "compute",
        "auxiliary_loss": "aux" in str(given.get("moe-router-load-balancing-type", "aux_loss"))
        and float(given.get("moe-aux-loss-coeff", 0) or 0) > 0,
    }
    if fields["scores"] == "sigmoid":
        fields["scores_first"] = False
    counts = {
        "moe-shared-expert-intermediate-size": "shared_ffn_hidden",
        "moe-router-num-groups": "groups",
        "moe-router-group-topk": "groups_top",
    }
    fields |= {name: int(given[argument]) for argument, name in counts.items() if given.get(argument)}
    if given.get("moe-router-topk-scaling-factor"):
        fields["scaling"] = float(given["moe-router-topk-scaling-factor"])
    plain = re.match(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?$", str(given.get("moe-layer-freq", "")).replace(" ", ""))
    if plain:
        fields["dense_layers"] = int(plain[1])
    return fields


def expert_ranks(facts: Facts) -> int:
    """Ranks that share a layer's experts: printed in a column, or as EP8, EP=8 in the notes or the locator."""
    column = whole(facts.text.get("ep", ""))
    return column or _printed(facts, "ep") or 1


def expert_parallel(facts: Facts) -> dict[str, Any]:
    """parallel.expert; ranks per expert as printed, else the tensor degree where that goes evenly, else 1."""
    degree, ranks = expert_ranks(facts), (facts.dp or 1) * facts.tp * facts.cp
    tensor = whole(facts.text.get("etp", "")) or _printed(facts, "etp")
    if tensor is None:
        tensor = facts.tp if ranks % (degree * facts.tp) == 0 else 1
    return {"degree": degree, "tensor": tensor}


def _printed(facts: Facts, name: str) -> int | None:
    for column in ("notes", "source_locator", "model_name"):
        found = re.search(rf"(?<![a-z]){name} ?=? ?(\d+)", facts.text.get(column, ""), re.IGNORECASE)
        if found:
            return int(found[1])
    return None
