"""The facts of one published run: a row of a table in the columns of the published measurements, read and typed.

Nothing is guessed here: a blank or a text where a number should be stays None, and `text` keeps what was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COLUMNS = (
    "source", "source_url", "source_locator", "model_name", "layers", "hidden", "ffn_hidden", "heads", "kv_heads",
    "vocab", "seq_len", "mlp_type", "attention", "gpu", "num_gpus", "tp", "sp", "pp", "vpp", "cp", "dp",
    "fsdp_or_zero", "micro_batch", "global_batch", "precision", "recompute", "offload", "compile", "step_time_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu", "peak_mem_gib", "notes",
)  # fmt: skip
"""The columns that are read. A table may have more; those are carried along."""

LONGEST_SAMPLE = r"longest sample \((\d+) tokens\)"
"""Where samples vary in length, the longest makes the memory's peak; times are of samples of all lengths."""

DP_IN_DOUBT = r"DP column printed \d+ does not always equal"
"""Notes that say so: the other degrees count."""

TWO_RUNS = r'raw tok="\d+ \(\d+\)"'
"""Two runs in one row of Megatron-Bridge's summary, which differ in "quantization granularities", as its note says: 8 bit
with one scale per tensor, and in parentheses MXFP8, as later releases label them. The first counts."""

NEEDED = ("layers", "hidden", "heads", "seq_len", "gpu", "num_gpus", "micro_batch", "global_batch")
"""Columns without which a table describes no training runs."""

VTRAIN_COLUMNS = {
    "# GPUs": "num_gpus", "global batch": "global_batch", "micro batch": "micro_batch", "hidden size": "hidden",
    "attention heads": "heads", "# layers": "layers", "sequence length": "seq_len", "tensor parallelism": "tp",
    "data parallelism": "dp", "pipeline parallelism": "pp",
}  # fmt: skip
VTRAIN_FACTS = {
    "source": "vTrain (Megatron-DeepSpeed)", "gpu": "A100-SXM4-80GB", "mlp_type": "gelu", "attention": "standard",
    "vocab": "50257", "precision": "fp16", "recompute": "none (doubtful)", "offload": "none", "compile": "no", "cp": "1",
    "fsdp_or_zero": "none",
}  # fmt: skip
"""What all of that table's rows share: what the page around it says, but for the recomputation that it speaks of, which is
not in the times, and the vocabulary of the program that made them (docs/validation.md)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One run. Counts are None where the row does not print a plain number; degrees default to 1."""

    text: Mapping[str, str] = field(repr=False)
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    decoder_layers: int | None
    target_len: int | None
    """Of an encoder-decoder: "enc 12 + dec 12" layers, "512/128" tokens."""
    num_gpus: int | None
    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int | None
    """As printed, else num_gpus / (tp pp cp) where that is whole."""
    micro_batch: int | None
    global_batch: int | None
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    peak_mem_gib: float | None

    def says(self, column: str, pattern: str) -> bool:
        """Does the text of a column match, upper or lower case?"""
        return re.search(pattern, self.text.get(column, ""), re.IGNORECASE) is not None


def facts_of(row: Mapping[str, str]) -> Facts:
    """The facts of a row of either kind of table (`VTRAIN_COLUMNS` for the second)."""
    text = {column: value.strip() for column, value in row.items()}
    if VTRAIN_COLUMNS.keys() <= text.keys():
        text = VTRAIN_FACTS | {name: text[column] for column, name in VTRAIN_COLUMNS.items()} | text
        text["step_time_s"] = _milliseconds(text.get("iteration time (ms)", ""))

    longest = re.search(LONGEST_SAMPLE, text.get("notes", ""))
    if longest is not None and not text.get("seq_len"):
        text |= {"seq_len": longest[1], "step_time_s": "", "tokens_per_s_per_gpu": "", "tflops_per_gpu": ""}

    if re.search(TWO_RUNS, text.get("notes", "")):
        text = {name: re.sub(r"^(\d+) \(\d+\)$", r"\1", value) for name, value in text.items()}
        text["precision"] = text.get("precision") or "FP8-CS (FP8-MX)"

    def count(name: str) -> int | None:
        return whole(text.get(name, ""))

    def size(name: str) -> float | None:
        return number(text.get(name, ""))

    layers, decoder_layers = _two(text.get("layers", ""), r"enc (\d+) \+ dec (\d+)")
    seq_len, target_len = _two(text.get("seq_len", ""), r"(\d+)/(\d+)")

    tp, pp, cp = (count(name) or 1 for name in ("tp", "pp", "cp"))
    if (ulysses := re.search(r"ulysses\D*(\d+)", text.get("cp", ""), re.IGNORECASE)) is not None:
        cp = int(ulysses[1])
    num_gpus, dp = count("num_gpus"), count("dp")
    if re.search(DP_IN_DOUBT, text.get("notes", "")):
        dp = None
    if dp is None and num_gpus is not None and num_gpus % (tp * pp * cp) == 0:
        dp = num_gpus // (tp * pp * cp)
    return Facts(
        text=text,
        layers=layers, hidden=count("hidden"), ffn_hidden=count("ffn_hidden"), heads=count("heads"),
        kv_heads=count("kv_heads"), vocab=count("vocab"), seq_len=seq_len, decoder_layers=decoder_layers,
        target_len=target_len,
        num_gpus=num_gpus, tp=tp, pp=pp, vpp=count("vpp") or 1, cp=cp, dp=dp,
        micro_batch=count("micro_batch"), global_batch=count("global_batch"),
        step_time_s=size("step_time_s"), tokens_per_s_per_gpu=size("tokens_per_s_per_gpu"),
        tflops_per_gpu=size("tflops_per_gpu"), peak_mem_gib=size("peak_mem_gib"),
    )  # fmt: skip


def _two(text: str, pattern: str) -> tuple[int | None, int | None]:
    """A plain count, or the two that a pattern finds."""
    match = re.fullmatch(pattern, text.strip())
    return (int(match[1]), int(match[2])) if match else (whole(text), None)


def arguments(facts: Facts) -> dict[str, Any]:
    """Megatron's argument list, where a table has one."""
    try:
        given = json.loads(facts.text.get("args_json", "") or "{}")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def has_offload(facts: Facts) -> bool:
    """Does anything wait in host memory?"""
    return facts.text.get("offload", "").lower() not in ("", "none", "no")


SHAPES = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab")
"""Columns that give a model its shape."""


def whole(text: str) -> int | None:
    """A plain count ("8", "8.0"); None for anything else ("<=4096", "enc 12 + dec 12", "1 (2)", "0")."""
    match = re.fullmatch(r"(\d+)(\.0+)?", text.strip())
    return int(match[1]) or None if match else None


def number(text: str) -> float | None:
    """A plain number above zero; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _milliseconds(text: str) -> str:
    value = number(text)
    return "" if value is None else repr(value / 1000)
