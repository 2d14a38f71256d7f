"""Configurations that people already have become scenarios: Megatron-LM, DeepSpeed, accelerate, torchtitan, Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sim.interop.accelerate import import_accelerate
from sim.interop.deepspeed import import_deepspeed
from sim.interop.draft import Account, Entry, Imported, ImportProblems
from sim.interop.export_megatron import export_megatron
from sim.interop.files import read_text
from sim.interop.huggingface import import_huggingface
from sim.interop.megatron import import_megatron
from sim.interop.options import Options
from sim.interop.torchtitan import import_torchtitan
from sim.interop.write import scenario_text, write_text

TOOLS: dict[str, Callable[[Path, str, Options], Imported]] = {
    "megatron": import_megatron,
    "deepspeed": import_deepspeed,
    "accelerate": import_accelerate,
    "torchtitan": import_torchtitan,
    "hf": import_huggingface,
}
"""Importers by the name that `sim import` takes."""


def import_file(tool: str, path: Path, options: Options) -> Imported:
    """A scenario from a tool's file. Raises ImportProblems with everything that is wrong."""
    return TOOLS[tool](path, read_text(path), options)


__all__ = [
    "TOOLS",
    "Account",
    "Entry",
    "ImportProblems",
    "Imported",
    "Options",
    "export_megatron",
    "import_file",
    "scenario_text",
    "write_text",
]
