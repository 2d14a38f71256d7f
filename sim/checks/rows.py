"""From a published row to a scenario: general rules, the same for every source. docs/validation.md lists them.

A rule uses what the row prints, what its software is known to do (`software.py`) and stated defaults for blanks. What
is assumed is said with the row's result. A row that a scenario cannot say is NotExpressible, with every reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sim.checks.cluster import UNPRINTED_GPU, cluster, gpu_of
from sim.checks.compiling import compiled
from sim.checks.eight_bit import fp8_recipe
from sim.checks.experts import preset_of, unprinted_experts
from sim.checks.expressible import NotExpressible
from sim.checks.facts import Facts, whole
from sim.checks.features import left_out, missing, sections
from sim.checks.megatron_age import as_of
from sim.checks.network import family_of, likely_heads, model
from sim.checks.recomputation import DISCARDED, PARTS, REGIONS, recomputed
from sim.checks.sharding import parallel
from sim.checks.software import Software, software_of
from sim.cost.profile import profile_for
from sim.hardware.catalogue import Gpu, find_gpu

Sections = dict[str, Any]

SELECTIVE = ["attention", "every_second_matmul"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A row's scenario, as a document, with what had to be assumed."""

    facts: Facts
    software: Software
    document: Sections
    assumptions: tuple[str, ...]

    @property
    def chooses_micro_batch(self) -> bool:
        """The row leaves the micro-batch open: the largest that fits stands for what its authors chose. With pipeline
        stages it is the software's, else 1, which makes the bubble smallest."""
        return self.facts.micro_batch is None and self.facts.pp == 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in the simulated step."""
        batch = self.document["batch"]
        assert self.facts.dp is not None
        tokens: int = batch["micro_batch"] * batch["seq_len"] * batch.get("accumulation", 1) * self.facts.dp
        return tokens

    def doubted(self) -> Sections:
        """The scenario where the row's recomputation is doubtful: all layers' in the place of none, else none."""
        recomputed = self.document["checkpoint"] is not None
        return self.document | {"checkpoint": None if recomputed else {"every": 1, **_stop(self.software, "full")}}


def plan_of(facts: Facts) -> Plan:
    """The scenario of a row. Raises NotExpressible."""
    reasons = missing(facts) + unprinted(facts)
    if reasons:
        raise NotExpressible("; ".join(reasons))
    software, assumptions = software_of(facts), list[str]()
    gpu = find_gpu(gpu_of(facts)[0])
    family = family_of(facts)
    assert family is not None
    shared = parallel(facts, software, assumptions)
    document: Sections = {
        "model": model(facts, family, software, assumptions),
        "cluster": cluster(facts, gpu),
        "batch": batch(facts, software, assumptions),
        "parallel": shared,
        "precision": precision(facts, gpu, software, shared, assumptions),
        "optimizer": {"variant": software.optimizer, "zero_grad": software.zero_grad},
        "checkpoint": checkpoint(facts, software, assumptions),
        "host": {"framework": software.framework, "launch_blocking": software.launch_blocking},
    }
    for name in ("torch", "allocator"):
        if getattr(software, name):
            document[name] = getattr(software, name)
    if gpu.name in software.gemm_efficiency:
        document["gemm_efficiency"] = software.gemm_efficiency[gpu.name]
    known = profile_for(gpu).figures.under("attention")
    kernel = next((kernel for kernel in attention_kernels(facts, software) if kernel in known), None)
    if kernel is not None:
        document["attention_kernel"] = kernel
    if facts.says("compile", "^yes"):
        how = "block by block" if compiled(facts) else "in the source: played in eager mode, norms fused"
        assumptions.append(f"compiled {how}")
    assumptions += left_out(facts)
    if software.extra:
        assumptions.append(software.extra)
    made = as_of(software.megatron, _merged(document, sections(facts)))
    if made["model"]["implementation"] == "torchtitan" and made["parallel"].get("tensor"):
        made["parallel"]["tensor"]["sequence_parallel"] = True  # as its plan has it
    return Plan(facts, software, made, tuple(assumptions))


def unprinted(facts: Facts) -> list[str]:
    """What a scenario needs and the row does not print, and labels that no rule knows."""
    reasons = []
    preset = preset_of(facts)
    for name in ("layers", "hidden", "heads"):
        guessed = name == "heads" and not facts.text.get(name) and likely_heads(facts) is not None
        if getattr(facts, name) is None and not guessed and (preset is None or facts.text.get(name)):
            reasons.append(_blank(facts, name))
    reasons += [_blank(facts, name) for name in ("seq_len", "num_gpus") if getattr(facts, name) is None]
    for name in ("tp", "pp", "cp"):
        if facts.text.get(name) and whole(facts.text[name]) is None and not facts.says(name, "ulysses"):
            reasons.append(_blank(facts, name))
    if not facts.text.get("precision") and software_of(facts).often_8_bit:
        reasons.append(_blank(facts, "precision"))
    if facts.says("notes", r"single (\w+ )?layer"):
        reasons.append("the time is of one layer, not of a step")
    if facts.micro_batch is None and facts.global_batch is None:
        reasons.append("neither micro_batch nor global_batch is printed")
    if gpu_of(facts)[0] == "":
        label = facts.text.get("gpu", "")
        printed = label and not re.search(UNPRINTED_GPU, label, re.IGNORECASE)
        reasons.append(f"GPU {label} is not in the catalogue" if printed else "gpu is not printed")
    reasons += unprinted_experts(facts)
    if family_of(facts) == "t5" and facts.target_len is None:
        reasons.append("the decoder's tokens per sequence are not printed")
    if family_of(facts) is None and not missing(facts):
        reasons.append("neither mlp_type nor model_name tells a Llama-like from a GPT-like model")
    if (
        facts.num_gpus is not None
        and facts.dp is not None
        and facts.dp * facts.tp * facts.pp * facts.cp != facts.num_gpus
    ):
        reasons.append(f"dp {facts.dp} x tp {facts.tp} x pp {facts.pp} x cp {facts.cp} is not {facts.num_gpus} GPUs")
    elif facts.num_gpus is not None and facts.dp is None:
        reasons.append(f"tp {facts.tp} x pp {facts.pp} x cp {facts.cp} does not divide {facts.num_gpus} GPUs")
    return reasons


def _blank(facts: Facts, name: str) -> str:
    text = facts.text.get(name, "")
    return f"{name} {text} is no plain number" if text else f"{name} is not printed"


def batch(facts: Facts, software: Software, assumptions: list[str]) -> Sections:
    """Accumulation from the global batch; a step that the source times per micro-batch has none. Blank: 1 sequence, or with
    pipeline stages what the software makes of its batch."""
    dp = facts.dp or 1
    micro, total = facts.micro_batch, facts.global_batch
    if micro is None:
        micro = 1
        if facts.pp > 1 and total is not None and software.micro_batch_per_stage:
            micro = max(1, total // dp // facts.pp)
        if facts.pp > 1:
            assumptions.append(f"micro-batch {micro}")
    accumulation = 1
    if total is not None and not facts.says("notes", "per ITERATION|per micro-?batch"):
        accumulation, rest = divmod(total, micro * dp)
        if rest or not accumulation:
            raise NotExpressible(f"global_batch {total} is no multiple of micro_batch {micro} x dp {dp}")
    elif total is None:
        assumptions.append("no gradient accumulation")
    lengths = {"seq_len": facts.seq_len} | ({"target_len": facts.target_len} if facts.target_len else {})
    return {"micro_batch": micro, **lengths, "accumulation": accumulation}


def precision(facts: Facts, gpu: Gpu, software: Software, shared: Sections, assumptions: list[str]) -> Sections:
    """16 bit for compute; parameters as the software stores them, or as the row says (all, true, pure)."""
    label = facts.text.get("precision", "").lower()
    if not label:
        assumptions.append("bf16 with fp32 parameters")
    if re.search(r"fp32|tf32", label) and not re.search(r"bf16|fp16", label):
        return {"parameters": "fp32", "compute": "fp32", "reduce": "fp32"}
    compute = "fp16" if re.search(r"fp16", label) and not re.search(r"bf16", label) else "bf16"
    if compute not in dict(gpu.peaks):
        compute = "fp16"
    megatron = software.gpt == "megatron"
    all_16_bit = re.search(r"\ball\b|true|pure|optimizer states", label)
    parameters = compute if all_16_bit or megatron or software.parameters != "fp32" else "fp32"
    if re.search(r"amp|fp32 params|mixed", label) and not megatron:
        parameters = "fp32"
    reduce = compute if facts.says("notes", "mode=pure") or software.reduce != "fp32" else "fp32"
    if "zero" in shared:  # DeepSpeed's main parameters are the optimizer's
        parameters = reduce = compute
    return {"parameters": parameters, "compute": compute, "reduce": reduce}


def checkpoint(facts: Facts, software: Software, assumptions: list[str]) -> Sections | None:
    """none; full: every layer; selective_op: attention and every second product; "1/2", "every 2": every second layer."""
    label = recomputed(facts).lower()
    stop = _stop(software, label)
    if not label and software.recompute:
        label = software.recompute
        assumptions.append(f"recompute {label}, the software's own")
    if not label:
        assumptions.append("recompute is not printed, none assumed")
    if not label or re.match(r"none|no\b|off|false", label):
        return None
    if fp8_recipe(facts) and any(re.search(words, label) for words, _ in DISCARDED):
        assumptions.append("norms and activations that are made again are played as saved in 8 bit")
        if not re.search(REGIONS, label):
            return None
    share = re.search(r"1/(\d+)|every[ _-]?(\d+)", label)
    if share:
        return {"every": int(share[1] or share[2]), **stop}
    if re.match(r"full|yes|true|recompute-block", label) or re.search(PARTS, label):
        return {"every": 1, **stop}
    if re.match(r"selective|sac", label):
        if software.name != "torchtitan":
            assumptions.append("selective recomputation as torchtitan's")
        return {"every": 1, "save": SELECTIVE, **stop}
    raise NotExpressible(f"recompute {label} is not known")


def _stop(software: Software, label: str) -> Sections:
    """How the software's recomputation ends: reentrant where it wraps whole layers, else early by its PyTorch."""
    if software.reentrant and (re.search(REGIONS, label) or not re.search(PARTS, label)):
        return {"reentrant": True}
    return {} if software.early_stop else {"early_stop": False}


def attention_kernels(facts: Facts, software: Software) -> tuple[str, ...]:
    """The kernel that ran, as the row says it, else the software's own; then what is timed where a profile lacks it."""
    for words, kernel in (("cudnn|te fused", "cudnn"), ("fa3|flash.?3", "flash3"), ("fa2|flash.?2|sdpa", "flash2")):
        if facts.says("attention", words):
            return (kernel, *NEAREST.get(kernel, ()))
    return () if software.flash is None else (software.flash, *NEAREST.get(software.flash, ()))


NEAREST = {"cudnn": ("flash3",)}
"""Kernels of the same generation, for profiles without figures of their own."""


def _merged(base: Sections, top: Sections) -> Sections:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
