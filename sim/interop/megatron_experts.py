"""Megatron's mixture of experts and multi-head latent attention as fields of the network."""

from __future__ import annotations

import re

from sim.interop.draft import Draft
from sim.model.config import Family

LONGEST_PATTERN = 10_000
DIRECT = {
    "moe-shared-expert-intermediate-size": "shared_ffn_hidden",
    "moe-shared-expert-gate": "shared_gate",
    "moe-router-pre-softmax": "scores_first",
    "moe-router-num-groups": "groups",
    "moe-router-group-topk": "groups_top",
    "moe-router-topk-scaling-factor": "scaling",
    "moe-router-enable-expert-bias": "selection_bias",
    "moe-expert-capacity-factor": "capacity_factor",
}
"""Arguments that are a field of `model.experts`."""


def put_experts(draft: Draft, family: Family) -> None:
    """The sections `model.experts` and `model.latent`."""
    _put_latent(draft)
    count = draft.get("num-experts")
    if not count:
        draft.use("num-experts", "no experts")
        return
    if family == "gpt" and not draft.has("disable-bias-linear"):
        draft.cannot("num-experts", "experts with biases")
        return
    path = "model.experts."
    draft.put(path + "count", count, "num-experts")
    draft.put(path + "top_k", draft.get("moe-router-topk"), "moe-router-topk")
    if draft.has("moe-ffn-hidden-size") or not draft.has("ffn-hidden-size"):
        width = draft.get("moe-ffn-hidden-size") or draft.document.value(("model", "ffn_hidden"))
        draft.put(path + "ffn_hidden", width, "moe-ffn-hidden-size")
    else:
        draft.put(path + "ffn_hidden", draft.get("ffn-hidden-size"), "ffn-hidden-size")
    for name, field in DIRECT.items():
        if draft.has(name):
            draft.put(path + field, draft.get(name), name)
    _put_dense_layers(draft)
    draft.put(path + "scores", draft.get("moe-router-score-function"), "moe-router-score-function")
    dtype = draft.get("moe-router-dtype")
    if dtype not in (None, "fp32"):
        draft.cannot("moe-router-dtype", f"the router in {dtype}: fp32 is played")
    draft.put(path + "router_dtype", "compute" if dtype is None else "fp32", "moe-router-dtype")
    draft.put(path + "permute_fusion", draft.has("moe-permute-fusion"), "moe-permute-fusion")
    balancing = draft.get("moe-router-load-balancing-type")
    kinds = [balancing] if isinstance(balancing, str) else list(balancing or ())
    if "sinkhorn" in kinds:
        draft.put(path + "sinkhorn", True, "moe-router-load-balancing-type")
    loss = any("aux_loss" in kind for kind in kinds)
    draft.put(path + "auxiliary_loss", loss, "moe-router-load-balancing-type")
    dispatcher = draft.get("moe-token-dispatcher-type")
    if dispatcher not in ("alltoall", "allgather", "flex"):
        draft.cannot("moe-token-dispatcher-type", f"{dispatcher} to the experts: all-to-all is played")
        dispatcher = "alltoall"
    draft.put(path + "dispatcher", dispatcher, "moe-token-dispatcher-type")
    draft.put(path + "grouped", draft.has("moe-grouped-gemm"), "moe-grouped-gemm")


def _put_dense_layers(draft: Draft) -> None:
    """moe-layer-freq: 1, or a list such as ([0]*3+[1]*58), where 0 is a layer with a plain MLP."""
    text = str(draft.get("moe-layer-freq"))
    kinds = "".join(
        digit * min(int((count or "1")[:6]), LONGEST_PATTERN)
        for digit, count in re.findall(r"\[?([01])\]?(?:\*(\d+))?", text)
    )
    if text == "1":
        draft.use("moe-layer-freq", "experts in every layer")
    elif re.fullmatch(r"\(?(\[[01]\]\*\d+|\[[01]\])(\+(\[[01]\]\*\d+|\[[01]\]))*\)?", text) and re.fullmatch(
        "0*1+", kinds
    ):
        draft.put("model.experts.dense_layers", kinds.count("0"), "moe-layer-freq")
    else:
        draft.cannot("moe-layer-freq", "plain MLPs other than in the first layers")


def _put_latent(draft: Draft) -> None:
    """Multi-head latent attention; a head's width without positions is model.head_dim."""
    if not draft.has("multi-latent-attention"):
        return
    draft.use("multi-latent-attention", "model.latent")
    path = "model.latent."
    draft.put(path + "kv_rank", draft.get("kv-lora-rank"), "kv-lora-rank")
    draft.put(path + "q_rank", draft.get("q-lora-rank") or 0, "q-lora-rank")
    draft.put(path + "rope_head_dim", draft.get("qk-pos-emb-head-dim"), "qk-pos-emb-head-dim")
    draft.put(path + "value_head_dim", draft.get("v-head-dim"), "v-head-dim")
    draft.put("model.head_dim", draft.get("qk-head-dim"), "qk-head-dim")
    draft.use("kv-channels", "not used: --qk-head-dim says the width of a head")
    draft.use("qk-layernorm", "the norms of compressed queries, keys and values")
