"""What a published run may use beyond a dense model, one GPU and FSDP, and where a scenario would say it.

Each feature names the field of the schema that expresses it. The schema is asked at run time: a feature whose field
exists is written into the scenario, one whose field does not makes the row "not expressible", with that reason. So a
new section of the schema needs one line here, or none.
"""

from __future__ import annotations

from typing import Any

from sim.checks.compiling import compile_section, compiled
from sim.checks.eight_bit import EIGHT_BIT, fp8_recipe, uses_float8
from sim.checks.experts import experts_of, has_experts, latent_of, uses_latent_attention
from sim.checks.expressible import Feature, expressible
from sim.checks.facts import Facts, arguments
from sim.checks.offload import activations_leave, states_leave, streams_states, what_leaves
from sim.checks.parallel_features import PARALLEL
from sim.checks.recipes import recipe_of
from sim.checks.recomputation import DISCARDED, INSIDE, parts
from sim.checks.training import (
    OTHER,
    PREFIX_ADAPTER,
    has_lora,
    is_four_bit,
    lora,
    loss_fusion,
    optimizer_name,
    steps_in_backward,
)

OTHER_NETWORK = (
    r"\bvit\b|llava|multimodal|retro|mamba|nemotron-?h|nemotron[ _-]?v?3(?!\d)|falcon|\bphi\b|phi-"
    r"|resnet|bamba|hybrid|toy"
)
TILED_LOSS = r"feature set: (\+|all features|ALST)"
TILED_MLP = r"feature set: (.*\+tiled MLP|all features|ALST)"
"""Features of Arctic Long Sequence Training, whose later rows have those of the earlier ones too."""

FEATURES = (
    Feature(
        name="a network that is no decoder", path="model.network", needed=lambda f: f.says("model_name", OTHER_NETWORK)
    ),
    Feature(name="experts", path="model.experts", needed=has_experts, value=experts_of),
    Feature(
        name="multi-token prediction",
        path="model.mtp_layers",
        needed=lambda f: recipe_of(f).mtp_layers > 0,
        value=lambda f: recipe_of(f).mtp_layers,
    ),
    Feature(name="latent attention", path="model.latent", needed=uses_latent_attention, value=latent_of),
    Feature(
        name="squared ReLU",
        path="model.activation",
        needed=lambda f: f.says("mlp_type", "squared"),
        value=lambda f: "squared_relu",
    ),
    Feature(
        name="Nemotron's norm",
        path="model.norm",
        needed=lambda f: f.says("mlp_type", "squared"),
        value=lambda f: "layer_norm",
    ),
    Feature(
        name="a head that is the embedding's matrix, or not",
        path="model.tied_embeddings",
        needed=lambda f: bool(arguments(f)) and not f.says("model_name", r"\b(bert|t5)\b"),
        value=lambda f: not arguments(f).get("untie-embeddings-and-output-weights"),
    ),
    Feature(
        name="losses in fused kernels",
        path="model.loss_fusion",
        needed=lambda f: loss_fusion(f) != "none",
        value=loss_fusion,
    ),
    Feature(
        name="linear layers without biases",
        path="model.bias",
        needed=lambda f: bool(arguments(f).get("disable-bias-linear")) and f.says("mlp_type", "^gelu"),
        value=lambda f: False,
    ),
    Feature(name="adapters (LoRA)", path="model.lora", needed=has_lora, value=lora),
    Feature(
        name="four-bit weights are bitsandbytes'",
        path="model.implementation",
        needed=is_four_bit,
        value=lambda f: "transformers",
    ),
    Feature(
        name="8-bit products",
        path="precision.float8",
        needed=uses_float8,
        value=lambda f: "rowwise" if f.says("precision", "rowwise") else "tensorwise",
    ),
    Feature(
        name="adapters before attention (LLaMA-Adapter)",
        path="model.prefix_adapter",
        needed=lambda f: f.says("notes", PREFIX_ADAPTER),
    ),
    Feature(
        name="8-bit or 4-bit numbers",
        path="precision.matmul",
        needed=lambda f: f.says("precision", EIGHT_BIT) and not (is_four_bit(f) or uses_float8(f) or fp8_recipe(f)),
    ),
    Feature(
        name="8-bit products by Transformer Engine",
        path="precision.fp8",
        needed=lambda f: fp8_recipe(f) not in (None, "nvfp4"),
        value=fp8_recipe,
    ),
    Feature(
        name="4-bit products by Transformer Engine",
        path="precision.fp4",
        needed=lambda f: fp8_recipe(f) == "nvfp4",
        value=lambda f: "nvfp4",
    ),
    Feature(
        name="SGD or AdamW in 8 bit",
        path="optimizer.name",
        needed=lambda f: optimizer_name(f) is not None,
        value=optimizer_name,
    ),
    Feature(
        name="a step inside backward",
        path="optimizer.in_backward",
        needed=steps_in_backward,
        value=lambda f: True,
    ),
    Feature(
        name="no clipping, which steps inside backward rule out",
        path="optimizer.clip_norm",
        needed=steps_in_backward,
    ),
    Feature(
        name="LOMO's parameters in 16 bit, of which there are no others",
        path="precision.parameters",
        needed=lambda f: f.says("notes", r"\blomo\b"),
        value=lambda f: "bf16",
    ),
    Feature(
        name="an optimizer that is not modelled",
        path="optimizer.other",
        needed=lambda f: f.says("notes", OTHER) or f.says("model_name", r"\bmuon\b|_muon"),
    ),
    *PARALLEL,
    Feature(
        name="a fused head and loss",
        path="model.liger",
        needed=lambda f: f.says("notes", TILED_LOSS),
        value=lambda f: ["fused_linear_cross_entropy"],
    ),
    Feature(
        name="an MLP in tiles",
        path="model.mlp_tiles",
        needed=lambda f: f.says("notes", TILED_MLP) and bool(f.hidden and f.seq_len),
        value=lambda f: -(-(f.seq_len or 0) // f.cp // (f.hidden or 1)),  # tokens of a rank / hidden, rounded up
    ),
    Feature(
        name="offload of activations",
        path="offload",
        needed=activations_leave,
        value=what_leaves,
    ),
    Feature(
        name="offload of states",
        path="offload.states",
        needed=states_leave,
    ),
    Feature(
        name="states streamed through the GPU",
        path="offload.streamed_states",
        needed=streams_states,
        without="what main memory holds and the GPU streams through once a step is not simulated",
    ),
    Feature(name="torch.compile", path="compile", needed=compiled, value=compile_section),
    Feature(
        name="recomputation inside a layer",
        path="checkpoint.inside",
        needed=lambda f: bool(parts(f, INSIDE)),
        value=lambda f: parts(f, INSIDE),
    ),
    Feature(
        name="outputs thrown away and made again",
        path="checkpoint.discard",
        needed=lambda f: bool(parts(f, DISCARDED)) and fp8_recipe(f) is None,
        value=lambda f: parts(f, DISCARDED),
    ),
    Feature(
        name="recomputation by a memory budget or of other parts",
        path="checkpoint.other",
        needed=lambda f: (
            f.says("recompute", r"partial|budget|re-gather|recompute-(att|qkv)")
            or f.says("notes", "modules=[^;]*up_proj")
        ),
    ),
)


def missing(facts: Facts) -> list[str]:
    """What the row uses and the schema cannot say, as reasons."""
    return [
        f"{feature.name}: scenarios have no {feature.path}"
        for feature in FEATURES
        if feature.needed(facts) and not feature.without and not expressible(feature.path)
    ]


def left_out(facts: Facts) -> list[str]:
    """What the row uses, the schema cannot say, and the scenario does without, as assumptions."""
    return [
        feature.without
        for feature in FEATURES
        if feature.without and feature.needed(facts) and not expressible(feature.path)
    ]


def sections(facts: Facts) -> dict[str, Any]:
    """The sections of a scenario that say what the row uses, of the features that the schema knows."""
    result: dict[str, Any] = {}
    for feature in FEATURES:
        if not feature.needed(facts) or not expressible(feature.path):
            continue
        *parents, last = feature.path.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = feature.value(facts)
    return result
