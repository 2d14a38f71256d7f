"""Draw the pictures of docs/strategies.md: python docs/make_pictures.py [family ...].

Every picture shows strategies of a shipped scenario side by side, on the same scales.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

from sim.api import Outcome, load, shown_lanes, simulate_setup
from sim.report.figure import compare_figure
from sim.report.picture import Picture, picture_of
from sim.units import format_bytes, format_duration

DOCS = Path(__file__).resolve().parent
SCENARIOS = DOCS.parent / "scenarios"
STRATEGIES, MEGATRON, CONTEXT = "strategies.yaml", "megatron_recompute.yaml", "context_parallel.yaml"
ADAPTERS, EXPERTS, SHARDING = "lora.yaml", "moe.yaml", "sharding_families.yaml"
COMPILED = "compiled.yaml"
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "segments": (STRATEGIES, ("none", "full", "every-2", "segments-of-4")),
    "sequential": (STRATEGIES, ("sequential-4", "uneven")),
    "nested": (STRATEGIES, ("segments-of-4", "nested-2x2x2")),
    "reentrant": (STRATEGIES, ("full", "reentrant")),
    "inside": (STRATEGIES, ("attention-inside", "mlp-inside", "selective", "per-layer")),
    "megatron": (MEGATRON, ("none", "core-attention", "all-three", "flash")),
    "compiled": (COMPILED, ("eager", "compiled", "loss-too", "float8")),
    "evaluation": (STRATEGIES, ("no_grad", "forgot-no_grad")),
    "optimizers": (STRATEGIES, ("none", "sgd", "adamw-8bit", "step-in-backward")),
    "loss": (STRATEGIES, ("whole-loss", "chunked-logits", "chunked-head", "none")),
    "adapters": (ADAPTERS, ("full", "frozen-half", "lora", "qlora", "lora-checkpoint")),
    "context": (CONTEXT, ("full", "ring", "all-gather")),
    "experts": (EXPERTS, ("balanced", "busy", "activation", "full")),
    "sharding": (SHARDING, ("ddp", "zero-1", "zero-3", "fsdp1-no-limit", "fsdp1", "fsdp2")),
}
"""Picture: scenario, and which of its strategies."""
COLOURS = 48  # of the palette: a picture stays below 60 kB


def draw(family: str) -> Path:
    """docs/img/strategies/<family>.png."""
    scenario, names = FAMILIES[family]
    setups = {setup.name: setup for setup in load(SCENARIOS / scenario).strategies}
    cells = [cell(simulate_setup(setups[name])) for name in names]
    image = BytesIO()
    compare_figure(cells).savefig(image, format="png", dpi=70)
    path = DOCS / "img" / "strategies" / f"{family}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(image).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    return path


def cell(outcome: Outcome) -> tuple[str, Picture]:
    """Title and picture of one strategy."""
    picture = picture_of(outcome, shown_lanes(outcome))
    step, peak = format_duration(picture.step_ms * 1e6), format_bytes(picture.peak_bytes)
    return f"{outcome.name}: {step}, peak {peak}", picture


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        print(draw(name))
