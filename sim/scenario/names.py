"""Names that later rooms give a meaning to, so that a scenario can refuse the others with file and line."""

from __future__ import annotations

FRAMEWORKS = ("eager", "megatron-deepspeed", "none", "transformers")
"""Host-cost profiles (sim.cost.host)."""

PROFILES = (
    "a100-pcie", "a100-sxm-40", "a100-sxm-80", "a10g", "a6000", "a800-sxm", "b200-sxm", "b300-sxm", "gb200", "gb300",
    "gh200", "h100-96gb-hbm2e", "h100-nvl", "h100-pcie", "h100-sxm", "h100-sxm-500w", "h20-sxm", "h200-sxm", "h800-sxm",
    "l40s", "mi250x", "mi300x", "rtx3090", "rtx4070tis", "rtx4090", "rtx5060ti", "rtx5090", "rtxpro6000",
    "v100-pcie", "v100-sxm",
)  # fmt: skip
"""Cost profiles (sim.cost.profile). "assumed:<gpu>" is one more for every GPU."""

OWN_PROFILE_ENDINGS = (".yaml", ".yml")


def is_own_profile(name: str) -> bool:
    """Does a name stand for a file that the user measured (sim.cost.own), not for a profile that ships?"""
    return name.endswith(OWN_PROFILE_ENDINGS)
