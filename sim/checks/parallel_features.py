"""What a published run may use beyond one GPU and FSDP: features of the section `parallel`."""

from __future__ import annotations

from sim.checks.compiling import compiled
from sim.checks.data_parallel import REPLICATED, STATES_SHARED, shares_gradients
from sim.checks.eight_bit import fp8_recipe, stores_fp8, uses_float8
from sim.checks.experts import expert_parallel, expert_ranks, has_experts
from sim.checks.expressible import Feature
from sim.checks.facts import Facts, arguments
from sim.checks.recipes import recipe_of
from sim.checks.software import software_of
from sim.checks.stages import pipeline_of


def _shares_tokens(facts: Facts) -> bool:
    """Sequence parallelism: as printed, else with experts, which need it, else as the software does."""
    if facts.text.get("sp"):
        return facts.says("sp", "^yes")
    return has_experts(facts) or software_of(facts).sequence_parallel


def _in_megatrons_loop(facts: Facts) -> bool:
    """Alone or with replicas, under main parameters in fp32."""
    return facts.dp == 1 or shares_gradients(facts, REPLICATED)


PARALLEL = (
    Feature(
        name="expert parallelism",
        path="parallel.expert",
        needed=lambda f: has_experts(f) and expert_ranks(f) > 1,
        value=expert_parallel,
    ),
    Feature(
        name="8-bit gathers",
        path="parallel.fsdp.float8_all_gather",
        needed=lambda f: uses_float8(f) and f.tp == 1 and (f.dp or 1) > 1 and not f.says("precision", "rowwise"),
        value=lambda f: True,
    ),
    Feature(
        name="weights gathered in 8 bit",
        path="parallel.fsdp.float8_all_gather",
        needed=lambda f: fp8_recipe(f) is not None and f.says("fsdp_or_zero", "fsdp"),
        value=lambda f: True,
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
        value=pipeline_of,
    ),
    Feature(
        name="context parallelism",
        path="parallel.context",
        needed=lambda f: f.cp > 1,
        value=lambda f: {"degree": f.cp},
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
        needed=lambda f: shares_gradients(f, REPLICATED),
        value=lambda f: {"degree": f.dp},
    ),
    Feature(
        name="main parameters in fp32",
        path="parallel.data",
        needed=lambda f: f.dp == 1 and software_of(f).gpt == "megatron",
        value=lambda f: {"degree": 1},
    ),
    Feature(
        name="ZeRO-1 or a distributed optimizer",
        path="parallel.data.distributed_optimizer",
        needed=lambda f: shares_gradients(f, STATES_SHARED),
        value=lambda f: True,
    ),
    Feature(
        name="moments in 16 bit",
        path="parallel.data.moments",
        needed=lambda f: recipe_of(f).moments != "fp32" and shares_gradients(f, STATES_SHARED),
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
        needed=lambda f: bool(arguments(f).get("no-gradient-accumulation-fusion")) and shares_gradients(f, REPLICATED),
        value=lambda f: False,
    ),
    Feature(
        name="gradients of both sizes",
        path="parallel.data.keep_gradients",
        needed=lambda f: software_of(f).bf16_optimizer and not f.says("precision", "fp16") and _in_megatrons_loop(f),
        value=lambda f: True,
    ),
    Feature(
        name="weights stored in 8 bit",
        path="parallel.data.fp8_parameters",
        needed=lambda f: stores_fp8(f) and shares_gradients(f, r"zero-?1|distributed optimizer"),
        value=lambda f: True,
    ),
    Feature(
        name="ZeRO-2",
        path="parallel.data.shard_gradients",
        needed=lambda f: shares_gradients(f, r"^zero-?2(?!-like|-style)"),
        value=lambda f: True,
    ),
    Feature(
        name="asynchronous tensor parallelism",
        path="parallel.tensor.asynchronous",
        needed=lambda f: f.tp > 1 and compiled(f) and f.says("notes", r"async ?tp"),
        value=lambda f: True,
    ),
)
