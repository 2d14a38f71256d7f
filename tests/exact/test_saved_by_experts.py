"""What an expert layer keeps for backward equals what megatron-core 0.16.1's layer keeps, tensor by tensor.

Recorded on a CPU with torch 2.13 (what the graph holds when forward has returned, one entry per storage, parameters
left out): MoELayer without Transformer Engine, so with experts one after the other; several ranks over gloo. H 64, F 88,
8 experts, top 2 unless a setting says otherwise, 96 tokens on each rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.model.calls import interpret
from sim.model.catalogue import build_model
from sim.model.experts import ExpertParallel
from sim.model.megatron_moe import MoeLayer
from sim.model.module import Module
from sim.model.shard.tensor import TensorParallel
from sim.runtime import ops
from sim.runtime.recorder import Recorder
from sim.runtime.tape import DeviceFacts, Tape
from sim.runtime.tensor import Tensor

assert ops  # importing it fills the tape's rules

RECORDINGS = Path(__file__).parent / "recordings" / "experts"
RECORDED = json.loads((RECORDINGS / "saved_by_a_layer.json").read_text())
SETTINGS = {
    "moe_router_topk": "top_k",
    "moe_router_pre_softmax": "scores_first",
    "moe_router_score_function": "scores",
    "moe_router_enable_expert_bias": "selection_bias",
    "moe_router_topk_scaling_factor": "scaling",
    "moe_router_num_groups": "groups",
    "moe_router_group_topk": "groups_top",
    "moe_shared_expert_intermediate_size": "shared_ffn_hidden",
    "moe_shared_expert_gate": "shared_gate",
}


ALONE = ExpertParallel()


def experts_of(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Our fields for Megatron's settings: experts one after the other, as without Transformer Engine."""
    fields = {SETTINGS[name]: value for name, value in settings.items() if name in SETTINGS}
    fields["router_dtype"] = settings.get("moe_router_dtype", "compute")
    fields["auxiliary_loss"] = "moe_aux_loss_coeff" in settings
    fields["sinkhorn"] = settings.get("moe_router_load_balancing_type") == "sinkhorn"
    fields["dispatcher"] = settings.get("moe_token_dispatcher_type", "alltoall")
    return {"count": 8, "top_k": 2, "ffn_hidden": 88, "permute_fusion": False, "grouped": False, **fields, **more}


def saved_by(experts: dict[str, Any], tokens: int, parallel: ExpertParallel = ALONE, gated: bool = True) -> list[int]:
    """Bytes of every storage that the layer's graph holds, parameters left out."""
    shapes, preset = (LLAMA, "mixtral-tiny") if gated else (GPT, "gpt-tiny")
    config = build_model(preset, {**shapes, "experts": experts}, "megatron")
    assert config.experts is not None
    tape = Tape(Recorder(None), DeviceFacts())
    tensor = TensorParallel(parallel.tensor, parallel.tensor > 1)
    layer = MoeLayer(config, config.experts, tensor, parallel)
    with interpret(tape):
        place(tape, layer)
        x = tape.empty((tokens, 1, 64), "bf16")
        x.requires_grad = True
        out = Tensor.of(layer(x))
    parameters = {id(slot.tensor.storage) for slot in layer.parameters() if isinstance(slot.tensor, Tensor)}
    storages, nodes, seen = {}, [out.node], set()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        for saved in getattr(node, "saved", ()):
            if isinstance(saved.value, Tensor) and saved.value.bytes and id(saved.value.storage) not in parameters:
                storages.setdefault(id(saved.value.storage), saved.value)
        nodes += [edge[0] for edge in node.edges if edge is not None]
    return sorted(t.storage.bytes for t in storages.values())


SHAPES = {"layers": 1, "hidden": 64, "ffn_hidden": 128, "heads": 4, "head_dim": 16, "vocab": 64, "max_positions": 64}
LLAMA = {**SHAPES, "family": "llama"}
GPT = {**SHAPES, "family": "gpt", "bias": False}


def place(tape: Tape, layer: Module) -> None:
    for slot in layer.parameters():
        slot.tensor = tape.empty(slot.shape, "bf16")
        slot.tensor.requires_grad = True


@pytest.mark.parametrize("recorded", RECORDED, ids=[recorded["name"] for recorded in RECORDED])
def test_a_layer_keeps_what_megatron_keeps(recorded: dict[str, Any]) -> None:
    """Here the real router chose, so that experts have unequal tokens: their tensors are compared as a sum."""
    saved = saved_by(experts_of(recorded["settings"]), recorded["tokens"])
    others = list(recorded["saved_bytes"])
    assert sum(saved) == sum(others) + recorded["expert_bytes"]
    for size in others:
        saved.remove(size)


SEVERAL = json.loads((RECORDINGS / "saved_by_a_layer_of_several_ranks.json").read_text())


@pytest.mark.parametrize("recorded", SEVERAL, ids=[recorded["name"] for recorded in SEVERAL])
def test_a_layer_of_several_ranks_keeps_what_megatron_keeps(recorded: dict[str, Any]) -> None:
    """Either dispatcher, with and without gates, experts over 2 ranks, each by 1 or 2: every tensor, balanced choices."""
    settings, parallel = recorded["settings"], ExpertParallel(recorded["ep"], recorded["etp"])
    assert (
        saved_by(experts_of(settings), recorded["tokens"], parallel, settings["gated_linear_unit"])
        == (recorded["saved_bytes"])
    )


def test_grouped_products_keep_the_same_bytes_in_fewer_tensors() -> None:
    one_by_one, together = saved_by(experts_of({}), 96), saved_by(experts_of({}, grouped=True), 96)
    assert sum(one_by_one) == sum(together) and len(one_by_one) == len(together) + 2 * (8 - 1)


def test_one_kernel_for_sorting_keeps_one_map_instead_of_masks_and_indices() -> None:
    """Transformer Engine's _moe_permute_mask_map: int32 [T, 2 E + 1]; chunks sorted by a map int32 [N] each way."""
    tokens, experts = 96, 8
    fused = saved_by(experts_of({}, permute_fusion=True), tokens)
    written_out = saved_by(experts_of({}), tokens)
    mask, weights, places = experts * tokens, 2 * experts * tokens, 8 * 2 * tokens
    assert sum(written_out) - sum(fused) == (
        mask + weights + places - 4 * tokens * (2 * experts + 1) - 3 * 4 * 2 * tokens
    )
