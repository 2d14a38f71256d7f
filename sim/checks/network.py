"""The network that a published row trains, as a scenario's section `model`: shapes as printed, code as the software's."""

from __future__ import annotations

from typing import Any

from sim.checks.compiling import compiled
from sim.checks.experts import has_experts, preset_of
from sim.checks.facts import SHAPES, Facts, arguments
from sim.checks.software import Software
from sim.checks.training import is_four_bit
from sim.model.catalogue import implementations_of, preset_shapes
from sim.model.config import Family

Sections = dict[str, Any]

GENERIC_PRESET = {"llama": "llama-2-7b", "gpt": "gpt2-small", "bert": "bert-large", "t5": "t5-base"}
FAMILIES: dict[str, Family] = {"llama": "llama", "gpt": "gpt", "bert": "bert", "t5": "t5"}
DEFAULT_VOCAB = {"llama": 32000, "gpt": 51200, "bert": 30522, "t5": 30622}
"""Where a row prints none. BERT: its words; T5 in Megatron: those and 100 sentinels."""


def family_of(facts: Facts) -> str | None:
    """bert and t5 by name; llama for gated MLPs and squared ReLU, gpt for GELU; by the model's name where the MLP is not
    printed."""
    if facts.says("model_name", r"\bbert\b"):
        return "bert"
    if facts.says("model_name", r"\bt5\b"):
        return "t5"
    if facts.says("mlp_type", "swiglu|silu|gated|squared"):
        return "llama"
    if facts.says("mlp_type", "gelu"):
        return "gpt"
    if facts.says("model_name", "llama|qwen|mistral|olmo|mixtral|deepseek|moonlight|nemotron|grok|kimi|gpt.?oss"):
        return "llama"
    return "gpt" if facts.says("model_name", "gpt|mpt|opt|bloom") else None


def model(facts: Facts, family: str, software: Software, assumptions: list[str]) -> Sections:
    """The whole section: shapes, whose code, and what that software does otherwise than the code that stands for it."""
    section = _shapes(facts, family, assumptions)
    code = section["implementation"] = _code(facts, family, software, assumptions)
    if code == "megatron":
        vocab = int(section.get("vocab") or preset_shapes(section["preset"])["vocab"])
        section["vocab"] = _padded(vocab, 128 * facts.tp) if software.pads_vocabulary else vocab - vocab % facts.tp
    return section | _layers(facts, family, code, software) | _loss_head(facts, family, code, software)


def _shapes(facts: Facts, family: str, assumptions: list[str]) -> Sections:
    """As printed, over those of the preset of that name; blanks: kv_heads = heads, MLP and vocabulary by family."""
    preset = preset_of(facts)
    if preset is not None and preset_shapes(preset)["family"] != family:
        preset = None
    section: Sections = {"preset": preset or GENERIC_PRESET[family]}
    section |= {name: value for name in SHAPES if (value := getattr(facts, name)) is not None}
    if preset is None:
        if facts.heads is None:
            section["heads"] = likely_heads(facts)
            assumptions.append(f"{section['heads']} heads, of a width near 128")
        section["kv_heads"] = facts.kv_heads or section["heads"]
        if facts.vocab is None:
            section["vocab"] = DEFAULT_VOCAB["gpt" if family == "llama" and facts.says("model_name", "gpt") else family]
            assumptions.append(f"vocabulary {section['vocab']}")
        if facts.ffn_hidden is None and facts.hidden is not None:
            section["ffn_hidden"] = _ffn_hidden(facts, facts.hidden, family)
            assumptions.append(f"ffn_hidden {section['ffn_hidden']}")
    if family == "t5" and facts.hidden is not None and facts.heads is not None:
        section |= {"decoder_layers": facts.decoder_layers or facts.layers, "head_dim": facts.hidden // facts.heads}
    section["max_positions"] = facts.seq_len
    if family == "llama":
        section["max_positions"] = max(facts.seq_len or 1, preset_shapes(section["preset"])["max_positions"])
    return section


def _code(facts: Facts, family: str, software: Software, assumptions: list[str]) -> str:
    """The implementation that is the software's, or stands for it."""
    code = software.llama if family == "llama" else software.gpt
    splits = facts.tp > 1 or (facts.cp > 1 and not facts.says("cp", "ulysses"))
    if code == "transformers" and family == "llama" and splits:
        code = "torchtitan"  # whose plan of DTensors it is
        assumptions.append("torchtitan's code stands for transformers', split over ranks")
    experts: Sections = {"experts": {}} if has_experts(facts) else {}
    known = implementations_of(FAMILIES[family], experts)
    if code not in known:
        assumptions.append(f"{known[0]}'s code stands for {code}'s")
        return known[0]
    return code


def _layers(facts: Facts, family: str, code: str, software: Software) -> Sections:
    """Norm, gated MLP, attention, dropout."""
    section: Sections = {}
    if family == "gpt" and code != "megatron":
        section["dropout"] = 0.0
    if family == "llama" and facts.says("compile", "^yes") and not compiled(facts):
        section["norm"] = "fused"  # as Inductor fuses what is written op by op
    elif family == "llama" and software.norm is not None:
        section["norm"] = software.norm
    if family == "llama" and code == "megatron" and software.swiglu_fusion is not None:
        section["swiglu_fusion"] = software.swiglu_fusion
    if code == "megatron" and (facts.cp > 1 or flash_attention(facts)):
        section["attention"] = "sdpa"  # context parallelism is Transformer Engine's
    elif facts.says("attention", "^standard") and code != "megatron":
        section["attention"] = "unfused" if family == "t5" else "math"
    return section


def _loss_head(facts: Facts, family: str, code: str, software: Software) -> Sections:
    """Where logits become fp32, in how many chunks, and whether the training loop holds them."""
    section: Sections = {}
    if family == "gpt" and code != "megatron":
        section["logits"] = "loss_upcast"
    if software.logits is not None:
        section["logits"] = software.logits
    chunks_loss = software.loss_chunks > 1 and code == "torchtitan" and not is_four_bit(facts)
    if chunks_loss and (facts.dp == 1 or facts.says("fsdp_or_zero", "fsdp-?2")):
        section |= {"loss_chunks": software.loss_chunks, "loss_chunking": "projection"}
    if software.keep_logits is not None:
        section["keep_logits"] = software.keep_logits
    return section


def likely_heads(facts: Facts) -> int | None:
    """Where a row prints none: so many that a head is as near to 128 wide as hidden and the tensor ranks allow; None where
    they allow nothing near."""
    hidden = facts.hidden or 0
    fit = [n for n in range(facts.tp, hidden // 64 + 1, facts.tp) if hidden % n == 0 and hidden <= 256 * n]
    return min(fit, key=lambda n: abs(hidden / n - 128), default=None)


def _ffn_hidden(facts: Facts, hidden: int, family: str) -> int:
    """4 x hidden; 8/3 x hidden with a gate: Megatron's arguments round it down to 64s, Llama's code up to 256s."""
    if family != "llama" or facts.says("mlp_type", "squared"):
        return 4 * hidden
    return hidden * 8 // 3 // 64 * 64 if arguments(facts) else -(-hidden * 8 // 3 // 256) * 256


def flash_attention(facts: Facts) -> bool:
    """Printed, or left to Transformer Engine, which takes flash attention where it can. The test files of Megatron's older
    cluster (dracooci) are of a time when their environment switched that off."""
    if facts.text.get("attention"):
        return facts.says("attention", "flash")
    chosen = arguments(facts).get("transformer-impl") == "transformer_engine"
    return chosen and not facts.says("platform", "dracooci")


def _padded(count: int, multiple: int) -> int:
    """Megatron pads the vocabulary to a multiple of 128 rows per tensor-parallel rank."""
    return -(-count // multiple) * multiple
