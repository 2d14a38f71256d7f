"""docs/strategies.md, its pictures and its scenarios belong together."""

from __future__ import annotations

import importlib.util
import re

import pytest

from sim.api import load
from tests.unit.scenarios import ROOT

PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"!\[\w+\]\((img/strategies/\w+\.png)\)", PAGE)
SCENARIOS = (
    "strategies.yaml", "megatron_recompute.yaml", "compiled.yaml", "moe.yaml", "lora.yaml", "sharding_families.yaml",
    "ulysses.yaml",
)  # fmt: skip


def families() -> dict[str, tuple[str, tuple[str, ...]]]:
    """FAMILIES of docs/make_pictures.py."""
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, tuple[str, tuple[str, ...]]] = module.FAMILIES
    return found


def test_every_family_has_a_picture_and_every_picture_a_family() -> None:
    assert [f"img/strategies/{family}.png" for family in families()] == PICTURES


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_there_and_small(picture: str) -> None:
    assert 0 < (ROOT / "docs" / picture).stat().st_size < 60_000


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_pictures_show_strategies_of_the_shipped_scenarios(scenario: str) -> None:
    strategies = {setup.name for setup in load(ROOT / "scenarios" / scenario).strategies}
    shown = {name for file, names in families().values() if file == scenario for name in names}
    assert shown and shown <= strategies
