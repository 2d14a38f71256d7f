"""What the performance recipes behind a table set and the table does not print: by model, card and precision.

Facts of the recipes in Megatron-Bridge's scripts/performance/configs, which its performance summary names as its source
("recompute/offload not printed in table, see repo recipes"); as they stand, releases differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sim.checks.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Of rows whose source, model, release (in the locator), GPU and precision have these words. `recompute`: Megatron's
    modules; `fused_experts`: biases and clamps of experts are part of their products' kernels; `flex`: HybridEP brings
    tokens to their experts."""

    source: str
    model: str
    release: str = ""
    gpu: str = ""
    precision: str = ""
    recompute: tuple[str, ...] = ()
    fused_experts: bool = False
    flex: bool = False
    virtual: int = 1
    """Stages per rank, where a row prints none."""
    moments: str = "fp32"
    """Dtype of Adam's moments: bf16 with the precision-aware optimizer."""
    mtp_layers: int = 0
    """Layers of multi-token prediction."""
    layouts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Layers of each stage, by the number of stages."""

    def covers(self, facts: Facts) -> bool:
        words = {"source": self.source, "model_name": self.model, "gpu": self.gpu, "precision": self.precision}
        words["source_locator"] = self.release
        return all(re.search(word, facts.text.get(column, ""), re.IGNORECASE) for column, word in words.items())


OF_2026 = r"\(26\.\d"
"""Containers since 26.02; before, Blackwell's recipes had all-to-all."""

OF_61_LAYERS = {4: (16,) * 3 + (13,), 8: (8,) * 7 + (5,), 16: (4,) * 15 + (1,), 32: (1,) + (2,) * 30 + (0,)}
"""The last stage has the head and the layer that predicts further tokens."""

RECIPES = (
    # gpt_oss_workload_base_configs.py: GB300 and B300 recompute nothing; MXFP8 sets cutedsl_fused_grouped_mlp
    Recipe(source="megatron-bridge", model="gpt.?oss", precision="mx", fused_experts=True, flex=True),
    Recipe(source="megatron-bridge", model="gpt.?oss", release=OF_2026, gpu=r"\bdgx-b300", flex=True),
    Recipe(source="megatron-bridge", model="gpt.?oss", gpu=r"gb200|\bb200|h100", recompute=("layernorm", "moe_act")),
    # qwen3_, deepseek_ and kimi_workload_base_configs.py: moe_flex_dispatcher_backend hybridep (deepep on some B200)
    Recipe(source="megatron-bridge", model="qwen3.30b", release=OF_2026, flex=True),
    Recipe(source="megatron-bridge", model="qwen3.235b", release=OF_2026, gpu="gb[23]00", flex=True),
    Recipe(source="megatron-bridge", model="kimi", release=OF_2026, flex=True, layouts=OF_61_LAYERS),
    # deepseek_v3.py: mtp_num_layers 1, set_deepseek_v3_pipeline_model_parallel_layout; NeMo 2's recipe has use_mtp
    Recipe(source="megatron-bridge", model="deepseek.*w/o mtp", layouts=OF_61_LAYERS),
    Recipe(source="megatron-bridge", model="deepseek", release=OF_2026, flex=True, mtp_layers=1, layouts=OF_61_LAYERS),
    Recipe(source="megatron-bridge", model="deepseek", mtp_layers=1, layouts=OF_61_LAYERS),
    Recipe(source="dgxc", model="deepseek", mtp_layers=1),
    # recipes/moonlight/moonlight_16b.py: use_precision_aware_optimizer, both moments in bf16, main parameters in fp32
    Recipe(source="megatron-bridge", model="moonlight", moments="bf16"),
    # NeMo 2's pretrain_nemotron4_340b and every release of dgxc-benchmarking that prints it
    Recipe(source="dgxc|nemo", model="nemotron-?4? ?-?340b", virtual=12),
    # NeMo's performance summary, whose table of 24.07 prints them for the same models over as many stages
    Recipe(source="nemo", model="llama2-13b|nemotron-22b", virtual=10),
    Recipe(source="nemo", model="llama2-70b", virtual=20),
    Recipe(source="nemo", model="llama3-70b", virtual=5),
    Recipe(source="nemo", model="gpt3-175b", virtual=6),
)
NONE = Recipe(source="", model="")


def recipe_of(facts: Facts) -> Recipe:
    """The first recipe that covers the row."""
    return next((recipe for recipe in RECIPES if recipe.covers(facts)), NONE)
