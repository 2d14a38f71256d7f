"""What is checked: a small GPT and a small Llama, four strategies, two batch sizes; and what host costs are learnt from.

Host costs are learnt from networks of other shapes, with other batches, than those that they are checked on.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.scenario import load_text
from sim.scenario.setup import Setup

PLAIN, EVERY_LAYER, EVERY_2, SELECTIVE = "plain", "every layer", "every 2", "selective"
STRATEGIES = (PLAIN, EVERY_LAYER, EVERY_2, SELECTIVE)
FAMILIES = ("gpt", "llama")
MODELS = {
    "gpt": "{{preset: gpt-tiny, implementation: nanogpt, layers: {layers}, hidden: {hidden}, ffn_hidden: {wide}, "
    "heads: {heads}, vocab: {vocab}, max_positions: {length}}}",
    "llama": "{{preset: llama-tiny, implementation: torchtitan, layers: {layers}, hidden: {hidden}, ffn_hidden: {ffn}, "
    "heads: {heads}, kv_heads: {kv_heads}, vocab: {vocab}, max_positions: {length}}}",
}
SCENARIO = """
model: {model}
cluster: {{gpu: a100-80gb, gpus_per_node: 1, nodes: 1}}
batch: {{micro_batch: {batch}, seq_len: {length}}}
precision: {{parameters: fp32, compute: fp32}}
optimizer: {{name: adamw, variant: fused, clip_norm: null}}
host: {{sync: []}}
strategies:
  plain: {{}}
  every layer: {{checkpoint: {{every: 1}}}}
  every 2: {{checkpoint: {{every: 2}}}}
  selective: {{checkpoint: {{save: [attention, aten.mm, aten.addmm]}}}}
"""
"""The GPU that it names is not used: the tape, the prices and the steps are those of this machine's processor."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of a network and its input. `wide`: of the GPT's MLP; `ffn`: of the Llama's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    wide: int
    ffn: int
    vocab: int
    length: int


WHOLE = Shapes(layers=4, hidden=256, heads=8, kv_heads=2, wide=1024, ffn=704, vocab=4096, length=128)
SHORT = Shapes(layers=2, hidden=64, heads=4, kv_heads=2, wide=256, ffn=176, vocab=256, length=32)
LEARNT_FROM = Shapes(layers=3, hidden=192, heads=6, kv_heads=3, wide=512, ffn=448, vocab=512, length=48)
BATCHES, SHORT_BATCHES, LEARNT_BATCH = (4, 8), (1, 2), 2


def strategies_of(family: str, shapes: Shapes, batch: int) -> tuple[Setup, ...]:
    """The four strategies of one network at one batch size."""
    sizes = {name: getattr(shapes, name) for name in Shapes.__slots__}
    text = SCENARIO.format(model=MODELS[family].format(**sizes), batch=batch, length=shapes.length)
    return load_text(text, f"{family}, batch {batch}").strategies
