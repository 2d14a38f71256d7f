"""From a published row's label of sharding to the family that it names."""

from __future__ import annotations

import re
from math import gcd
from typing import Any

from sim.checks.data_parallel import REPLICATED, has_families
from sim.checks.experts import preset_of
from sim.checks.expressible import NotExpressible
from sim.checks.facts import Facts
from sim.checks.offload import states_on_host
from sim.checks.software import Software
from sim.checks.training import has_lora
from sim.model.catalogue import preset_shapes

KEEPS_GATHERED = r"shard_grad_op|zero-?2-like|hybrid_shard_zero2"


def parallel(facts: Facts, software: Software, assumptions: list[str]) -> dict[str, Any]:
    """The section `parallel` of a row's data parallelism, as far as it is no feature (Megatron's is one).

    A family stands alone: beside tensor, pipeline or context parallelism, adapters or torch.compile, FSDP2 stands for it.
    """
    dp = facts.dp or 1
    label = facts.text.get("fsdp_or_zero", "").lower()
    if not label and dp * facts.cp > 1:
        label = software.sharding
        if not label:
            raise NotExpressible("fsdp_or_zero is not printed: how the ranks share the work is unknown")
        assumptions.append(f"sharding {label}, the software's own")
    on_host = states_on_host(facts) or {}
    if dp * facts.cp == 1 and not on_host:
        return {}
    alone = has_families(facts)
    if alone and re.search(r"shard-", label):  # LLMQ's switches, one by one
        raise NotExpressible(f"sharding {label} is not known")
    zero = re.search(r"^zero-?([123])(?!-like)", label)
    if alone and zero:
        return {
            "zero": {"degree": dp, "stage": int(zero[1])} | _sizes(int(zero[1]), facts, software, assumptions) | on_host
        }
    if re.search(REPLICATED, label):
        return {"ddp": {"degree": dp}} if alone else {}
    sharded: dict[str, Any] = {"degree": dp}
    if re.search(r"hsdp|hybrid", label) and facts.num_gpus and facts.num_gpus > 8:
        sharded |= {"degree": gcd(dp, 8), "replicas": dp // gcd(dp, 8)}
    if not re.search(r"fsdp|zero-?3", label):
        raise NotExpressible(f"sharding {label} is not known")
    keeps = re.search(KEEPS_GATHERED, label) is not None
    if alone and re.search(r"fsdp(?!-?2)", label):
        return {"fsdp1": sharded | ({"strategy": "shard_grad_op"} if keeps else {})}
    if not re.search(r"fsdp-?2", label):
        assumptions.append(f"{'ZeRO-3' if 'zero' in label and 'fsdp' not in label else 'FSDP1'} played as FSDP2")
    resharding = {"reshard_after_forward": False} if keeps else {}
    return {"fsdp": sharded | resharding | on_host | _units(facts, software)}


def _units(facts: Facts, software: Software) -> dict[str, str]:
    """What the software wraps where the head is a matrix of its own."""
    preset = preset_of(facts)
    untied = preset is not None and not preset_shapes(preset).get("tied_embeddings")
    return {"units": software.units} if software.units and untied and not has_lora(facts) else {}


def _sizes(stage: int, facts: Facts, software: Software, assumptions: list[str]) -> dict[str, int]:
    """Sizes that transformers fills in for "auto"."""
    preset = preset_of(facts)
    hidden = facts.hidden or (preset_shapes(preset)["hidden"] if preset else None)
    if not software.sizes_zero or hidden is None:
        return {}
    assumptions.append("ZeRO's sizes as transformers makes them of auto")
    sizes = {"reduce_bucket_size": hidden * hidden}
    if stage == 3:
        sizes |= {"prefetch_bucket_size": 9 * hidden * hidden // 10, "persistence_threshold": 10 * hidden}
    return sizes
