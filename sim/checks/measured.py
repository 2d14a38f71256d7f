"""What a published row measured, by its source's own definitions: a step time, and which of the four memory counters."""

from __future__ import annotations

from sim.checks.facts import Facts
from sim.checks.software import Counter, Software
from sim.model.config import ModelConfig
from sim.model.flops import model_flops_per_token

COUNTER_WORDS: tuple[tuple[str, Counter], ...] = (
    (r"peak_mem = reserved|torchtitan logs|max_?memory_reserved", "reserved"),
    (r"peak_mem = active|memory active", "active"),
    (r"max_memory_allocated|max_allocated|allocated_bytes|peak allocated", "allocated"),
    (r"nvidia-smi", "device"),
)
"""Words of a row's notes that say which counter it printed, in the order in which they are looked for."""

EQUATION_3 = r"narayanan|ptd-p|dlperf"
"""Sources whose TFLOP/s follow PTD-P's equation 3, recomputation included."""

CAUSAL_FLOPS = r"stas00|ml-engineering"
"""Sources whose TFLOP/s count attention's half below the diagonal, and a third more where they recompute."""

MODEL_FLOPS = r"nemo|megatron-bridge"
"""Sources whose TFLOP/s are 6 N + 12 L h s FLOPs per token, without recomputation: so say their rows that print both."""


def step_s(facts: Facts, tokens_per_step: int, model: ModelConfig | None = None) -> float | None:
    """The published time of the simulated step: printed, or from tokens/s, or from TFLOP/s whose formula is known; None where
    the notes say that its time tells nothing."""
    assert facts.num_gpus is not None
    if facts.says("notes", "use memory only"):
        return None
    if facts.step_time_s is not None:
        return facts.step_time_s
    if facts.tokens_per_s_per_gpu is not None:
        return tokens_per_step / facts.num_gpus / facts.tokens_per_s_per_gpu
    if facts.tflops_per_gpu is not None and facts.says("source", EQUATION_3):
        return ptdp_flops(facts, tokens_per_step) / (facts.num_gpus * facts.tflops_per_gpu * 1e12)
    if facts.tflops_per_gpu is not None and model is not None and facts.says("source", MODEL_FLOPS):
        flops = model_flops_per_token(model, facts.seq_len or 0) * tokens_per_step
        return flops / (facts.num_gpus * facts.tflops_per_gpu * 1e12)
    if facts.tflops_per_gpu is not None and model is not None and facts.says("source", CAUSAL_FLOPS):
        seq_len = facts.seq_len or 0
        halved = (model_flops_per_token(model, seq_len) + model_flops_per_token(model, 0)) / 2
        again = 4 / 3 if facts.says("recompute", "^full") else 1
        return halved * tokens_per_step * again / (facts.num_gpus * facts.tflops_per_gpu * 1e12)
    return None


def ptdp_flops(facts: Facts, tokens_per_step: int) -> float:
    """FLOPs of a step with full recomputation: 96 B s l h^2 (1 + s/6h + V/16lh) (arXiv 2104.04473, equation 3)."""
    assert facts.layers and facts.hidden and facts.seq_len
    layers, hidden = facts.layers, facts.hidden
    vocab = facts.vocab or 51200
    share = 1 + facts.seq_len / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * tokens_per_step * layers * hidden**2 * share


def counter(facts: Facts, software: Software) -> Counter:
    """Which of the four memory counters the row's `peak_mem_gib` is."""
    for words, kind in COUNTER_WORDS:
        if facts.says("notes", words):
            return kind
    return software.memory


def ranks(facts: Facts, count: int) -> range:
    """The pipeline ranks whose memory the row prints: all (the largest counts), or the one that its notes name."""
    if facts.says("notes", "last rank"):
        return range(count - 1, count)
    return range(1) if facts.says("notes", r"rank ?0\b") else range(count)
