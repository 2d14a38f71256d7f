"""Which family of data parallelism a published row uses, and what of its states it keeps on the host."""

from __future__ import annotations

from sim.checks.eight_bit import compiled, has_offload
from sim.checks.facts import Facts
from sim.checks.software import software_of
from sim.checks.training import has_lora


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
