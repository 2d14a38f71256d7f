"""What a published run may use beyond a dense model, one GPU and FSDP, and where a scenario would say it.

Each feature names the field of the schema that expresses it. The schema is asked at run time: a feature whose field
exists is written into the scenario, one whose field does not makes the row "not expressible", with that reason. So a
new section of the schema needs one line here, or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.checks.data_parallel import has_families, states_on_host, streams_states
from sim.checks.eight_bit import EIGHT_BIT, compile_section, compiled, fp8_recipe, has_offload, stores_fp8, uses_float8
from sim.checks.experts import (
    expert_parallel,
    expert_ranks,
    experts_of,
    has_experts,
    latent_of,
    uses_latent_attention,
)
from sim.checks.expressible import expressible
from sim.checks.facts import Facts, arguments
from sim.checks.recipes import recipe_of
from sim.checks.recomputation import DISCARDED, INSIDE, parts
from sim.checks.software import software_of
from sim.checks.stages import pipeline_of
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
REPLICATED = r"^(none|no|ddp|dp)\b|zero-?1|^zero-?2(?!-like)|distributed optimizer"
STATES_SHARED = r"zero-?1|^zero-?2-style|distributed optimizer"
STATES = r"opt|param|master|gradient|quants|residual"
"""Words of a row that speak of what a feature is."""


class NotExpressible(Exception):
    """A row that a scenario cannot say; the message has every reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """`needed`: does the row use it? `path`: the field that expresses it; `value`: what to write there."""

    name: str
    path: str
    needed: Callable[[Facts], bool]
    value: Callable[[Facts], Any] = lambda _: None
    without: str = ""
    """What is assumed where the schema lacks the field; without such words the row is not expressible then."""


def _shares_tokens(facts: Facts) -> bool:
    """Sequence parallelism: as printed, else with experts, which need it, else as the software does."""
    if facts.text.get("sp"):
        return facts.says("sp", "^yes")
    return has_experts(facts) or software_of(facts).sequence_parallel


def _shared(facts: Facts, label: str) -> bool:
    """Do several ranks reduce gradients together, and share states as the label says, or where there is none, as their
    software does, in Megatron's loop? Context-parallel ones do too."""
    printed = facts.text.get("fsdp_or_zero", "") or software_of(facts).sharding
    several = (facts.dp or 1) * facts.cp > 1
    return several and re.search(label, printed, re.IGNORECASE) is not None and not has_families(facts)


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
        name="expert parallelism",
        path="parallel.expert",
        needed=lambda f: has_experts(f) and expert_ranks(f) > 1,
        value=expert_parallel,
    ),
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
        value=lambda f: loss_fusion(f),
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
        needed=lambda f: uses_float8(f),
        value=lambda f: "rowwise" if f.says("precision", "rowwise") else "tensorwise",
    ),
    Feature(
        name="8-bit gathers",
        path="parallel.fsdp.float8_all_gather",
        needed=lambda f: uses_float8(f) and f.tp == 1 and (f.dp or 1) > 1 and not f.says("precision", "rowwise"),
        value=lambda f: True,
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
        value=lambda f: fp8_recipe(f),
    ),
    Feature(
        name="4-bit products by Transformer Engine",
        path="precision.fp4",
        needed=lambda f: fp8_recipe(f) == "nvfp4",
        value=lambda f: "nvfp4",
    ),
    Feature(
        name="weights gathered in 8 bit",
        path="parallel.fsdp.float8_all_gather",
        needed=lambda f: fp8_recipe(f) is not None and f.says("fsdp_or_zero", "fsdp"),
        value=lambda f: True,
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
    Feature(
        name="tensor parallelism",
        path="parallel.tensor",
        needed=lambda f: f.tp > 1,
        value=lambda f: {"degree": f.tp, "sequence_parallel": _shares_tokens(f)},
    ),
    Feature(
        name="pipeline parallelism",
        path="parallel.pipeline",
        needed=lambda f: f.pp > 1,
        value=lambda f: pipeline_of(f),
    ),
    Feature(
        name="context parallelism",
        path="parallel.context",
        needed=lambda f: f.cp > 1,
        value=lambda f: {"degree": f.cp},
    ),
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
        name="Ulysses' all-to-all",
        path="parallel.context.kind",
        needed=lambda f: f.cp > 1 and f.says("cp", "ulysses"),
        value=lambda f: "ulysses",
    ),
    Feature(
        name="replicated data parallelism",
        path="parallel.data",
        needed=lambda f: _shared(f, REPLICATED),
        value=lambda f: {"degree": f.dp},
    ),
    Feature(
        name="main parameters in fp32",
        path="parallel.data",
        needed=lambda f: f.dp == 1 and software_of(f).gpt == "megatron",
        value=lambda f: {"degree": 1},
        without="fp32 main parameters and gradients are not simulated",
    ),
    Feature(
        name="ZeRO-1 or a distributed optimizer",
        path="parallel.data.distributed_optimizer",
        needed=lambda f: _shared(f, STATES_SHARED),
        value=lambda f: True,
    ),
    Feature(
        name="moments in 16 bit",
        path="parallel.data.moments",
        needed=lambda f: recipe_of(f).moments != "fp32" and _shared(f, STATES_SHARED),
        value=lambda f: recipe_of(f).moments,
    ),
    Feature(
        name="several instances of the distributed optimizer",
        path="parallel.data.optimizer_instances",
        needed=lambda f: int(arguments(f).get("num-distributed-optimizer-instances", 1)) > 1,
        value=lambda f: int(arguments(f)["num-distributed-optimizer-instances"]),
    ),
    Feature(
        name="products that do not add to main gradients",
        path="parallel.data.gradient_accumulation_fusion",
        needed=lambda f: bool(arguments(f).get("no-gradient-accumulation-fusion")) and _shared(f, REPLICATED),
        value=lambda f: False,
    ),
    Feature(
        name="weights stored in 8 bit",
        path="parallel.data.fp8_parameters",
        needed=lambda f: stores_fp8(f) and _shared(f, r"zero-?1|distributed optimizer"),
        value=lambda f: True,
    ),
    Feature(
        name="ZeRO-2",
        path="parallel.data.shard_gradients",
        needed=lambda f: _shared(f, r"^zero-?2(?!-like|-style)"),
        value=lambda f: True,
    ),
    Feature(
        name="offload of activations",
        path="offload",
        needed=lambda f: (
            has_offload(f)
            and f.says("offload", "activation")
            and not (f.says("offload", STATES) and states_on_host(f) is None)
        ),
        value=lambda f: _offloaded(f),
    ),
    Feature(
        name="offload of states",
        path="offload.states",
        needed=lambda f: (
            has_offload(f)
            and (f.says("offload", STATES) or not f.says("offload", "activation"))
            and states_on_host(f) is None
            and not streams_states(f)
        ),
    ),
    Feature(
        name="states streamed through the GPU",
        path="offload.streamed_states",
        needed=lambda f: has_offload(f) and streams_states(f),
        without="what main memory holds and the GPU streams through once a step is not simulated",
    ),
    Feature(name="torch.compile", path="compile", needed=lambda f: compiled(f), value=lambda f: compile_section(f)),
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
        name="asynchronous tensor parallelism",
        path="parallel.tensor.asynchronous",
        needed=lambda f: f.tp > 1 and compiled(f) and f.says("notes", r"async ?tp"),
        value=lambda f: True,
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


def _offloaded(facts: Facts) -> dict[str, Any]:
    """Checkpointed layers' inputs, or what layers save; a ratio of the layers where the row prints one, with stages of what
    each saves for a micro-batch."""
    if facts.says("offload", "boundary|checkpoint|ckpt"):
        return {"what": "checkpoint_inputs"}
    share = re.search(r"ratio ([\d.]+)", facts.text["offload"])
    if share and facts.pp > 1:
        return {"what": "stage_activations", "share": float(share[1])}
    return {"what": "activations"} | ({"layers": f"ratio {float(share[1]):g}"} if share else {})


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
