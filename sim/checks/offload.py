"""What of a published run waits in host memory: activations, or states that the CPU or the GPU steps."""

from __future__ import annotations

import re
from typing import Any

from sim.checks.data_parallel import has_families
from sim.checks.facts import Facts, has_offload
from sim.checks.software import software_of

STATES = r"opt|param|master|gradient|quants|residual"
"""Words of a row that speak of states."""


def activations_leave(facts: Facts) -> bool:
    """Activations, and no states beside them but those that a family of `parallel` keeps on the host."""
    states = facts.says("offload", STATES) and states_on_host(facts) is None
    return has_offload(facts) and facts.says("offload", "activation") and not states


def what_leaves(facts: Facts) -> dict[str, Any]:
    """Checkpointed layers' inputs, or what layers save; a ratio of the layers where the row prints one, with stages of what
    each saves for a micro-batch."""
    if facts.says("offload", "boundary|checkpoint|ckpt"):
        return {"what": "checkpoint_inputs"}
    share = re.search(r"ratio ([\d.]+)", facts.text["offload"])
    if share and facts.pp > 1:
        return {"what": "stage_activations", "share": float(share[1])}
    return {"what": "activations"} | ({"layers": f"ratio {float(share[1]):g}"} if share else {})


def states_leave(facts: Facts) -> bool:
    """States, in a way that no family of `parallel` knows."""
    states = facts.says("offload", STATES) or not facts.says("offload", "activation")
    return has_offload(facts) and states and states_on_host(facts) is None and not streams_states(facts)


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
    return has_offload(facts) and software_of(facts).name == "LLMQ" and facts.says("offload", "offload-")
