"""What of a published run torch.compile makes, and what is played in eager mode in its place."""

from __future__ import annotations

from sim.checks.facts import Facts, has_offload
from sim.checks.software import software_of
from sim.checks.training import is_four_bit, steps_in_backward


def compiled(facts: Facts) -> bool:
    """With offload, adapters on four-bit weights, steps inside backward, or ranks that share layers (but torchtitan's),
    blocks are played in eager mode."""
    shared = facts.tp * facts.cp > 1 and software_of(facts).llama != "torchtitan"
    eager = has_offload(facts) or is_four_bit(facts) or steps_in_backward(facts) or shared
    return facts.says("compile", "^yes") and not eager


def compile_section(facts: Facts) -> dict[str, bool]:
    """What is compiled beside the blocks: the loss, where the software does so."""
    return {"loss": True} if software_of(facts).compiled_loss and facts.pp * facts.tp == 1 else {}
