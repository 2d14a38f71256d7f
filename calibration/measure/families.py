"""The scripts, by family: one module each, with `cases(device)` and perhaps `readings(device)`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from calibration.measure.case import Case, Reading
from calibration.measure.device import Device
from calibration.measure.recipes import Recipe
from calibration.measure.words import FAMILIES


def script(family: str) -> Any:
    return import_module(f"calibration.measure.{family}")


def cases_of(family: str, device: Device) -> list[Case]:
    """The covering design of one family."""
    module = script(family)
    return list(module.cases(device)) if hasattr(module, "cases") else []


def readings_of(family: str, device: Device) -> list[Reading]:
    module = script(family)
    return list(module.readings(device)) if hasattr(module, "readings") else []


def recipes(families: Iterable[str] = FAMILIES) -> dict[str, tuple[str, Recipe]]:
    """Family and recipe of every memory-bound kernel that a script knows, by the kernel's name."""
    return {
        recipe.name: (family, recipe)
        for family in reversed(tuple(families))
        for recipe in reversed(getattr(script(family), "RECIPES", ()))
    }
