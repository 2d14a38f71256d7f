"""How the ranks of a published row share the work on different data: family, and whose gradients they sum."""

from __future__ import annotations

import re

from sim.checks.compiling import compiled
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


def shares_gradients(facts: Facts, label: str) -> bool:
    """Do several ranks reduce gradients together, and share states as the label says, or where there is none, as their
    software does, in Megatron's loop? Context-parallel ones do too."""
    printed = facts.text.get("fsdp_or_zero", "") or software_of(facts).sharding
    several = (facts.dp or 1) * facts.cp > 1
    return several and re.search(label, printed, re.IGNORECASE) is not None and not has_families(facts)
