"""Configurations as people keep them (scenarios/import), and how they are imported."""

from __future__ import annotations

from pathlib import Path

from sim.interop import Imported, Options, import_file
from tests.unit.scenarios import ROOT

FOLDER = ROOT / "scenarios" / "import"
GPT3, GPT22B, ZERO3_OFFLOAD, FSDP, TITAN, CONFIG = (
    (FOLDER / name).read_text(encoding="utf-8")
    for name in (
        "gpt3_175b.sh",
        "gpt_22b.sh",
        "zero3_offload.json",
        "fsdp.yaml",
        "llama3_8b.toml",
        "llama_tiny/config.json",
    )
)

A100, H100 = Options(gpu="a100-sxm-80gb"), Options(gpu="h100-sxm-80gb")
LLAMA = Options(gpu="h100-sxm-80gb", model="llama-3.1-8b", seq_len=4096)


def imported(folder: Path, tool: str, name: str, text: str, options: Options) -> Imported:
    """Import a text as a file of that name."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return import_file(tool, path, options)


def megatron(folder: Path, *arguments: str, options: Options = A100) -> Imported:
    """A small GPT on 8 GPUs with further arguments."""
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {BASE} {' '.join(arguments)}\n"
    return imported(folder, "megatron", "run.sh", text, options)


BASE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --padded-vocab-size 51200 --bf16"
)
