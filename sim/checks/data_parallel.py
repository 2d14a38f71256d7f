"""Which family of data parallelism a published row uses, and what of its states it keeps on the host."""

from __future__ import annotations

import re

from sim.checks.eight_bit import compiled, has_offload
from sim.checks.facts import Facts
from sim.checks.software import software_of
from sim.checks.training import has_lora

REPLICATED = r"^(none|no|ddp|dp)\b|zero-?1|^zero-?2(?!-like)|distributed optimizer"
STATES_SHARED = r"zero-?1|^zero-?2-style|distributed optimizer"
"""Labels of data parallelism: every rank holds all parameters; ranks share the optimizer's states beside them."""


def has_families(facts: Facts) -> bool:
    """Can its data parallelism be a family of `parallel` that stands alone? Megatron has its own; adapters and compiled
    blocks are played with FSDP2 only; of ranks that share sequences DeepSpeed's Ulysses with ZeRO."""
    other = has_lora(facts) or compiled(facts) or facts.tp * facts.pp > 1
    alone = facts.cp == 1 or (facts.says("cp", "ulysses") and software_of(facts).llama == "transformers")
    return software_of(facts).gpt != "megatron" and alone and not other


def states_on_host(facts: Facts) -> dict[str, str | bool] | None:
    """What a family of `parallel` calls the states that the row's CPU holds and steps; None where it holds none, or in
    a way of another program: LLMQ's and Megatron's keep some states there and step on the GPU."""
    if not (has_offload(facts) and has_families(facts) and facts.says("offload", "cpu")):
        return None
    if facts.says("fsdp_or_zero", r"^zero-?[123](?!-like)") and facts.says("offload", "optimizer"):
        away: dict[str, str | bool] = {"offload_optimizer": "cpu"}
        return away | ({"offload_param": "cpu"} if facts.says("offload", "param") else {})
    if facts.says("fsdp_or_zero", "^fsdp-?2") and facts.says("offload", "param"):
        return {"cpu_offload": True}
    return None


def streams_states(facts: Facts) -> bool:
    """LLMQ's switches: states that the GPU steps with while they stream from main memory and back, once a step."""
    return software_of(facts).name == "LLMQ" and facts.says("offload", "offload-")


def shares_gradients(facts: Facts, label: str) -> bool:
    """Do several ranks reduce gradients together, and share states as the label says, or where there is none, as their
    software does, in Megatron's loop? Context-parallel ones do too."""
    printed = facts.text.get("fsdp_or_zero", "") or software_of(facts).sharding
    several = (facts.dp or 1) * facts.cp > 1
    return several and re.search(label, printed, re.IGNORECASE) is not None and not has_families(facts)
