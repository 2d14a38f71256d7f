"""sim: one training step of a neural network, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.api import Outcome, Result, load, simulate
    from sim.scenario.problems import ScenarioError

__version__ = "0.1.0"
__all__ = ["Outcome", "Result", "ScenarioError", "load", "simulate"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import sim.units` costs nothing."""
    if name == "ScenarioError":
        from sim.scenario.problems import ScenarioError

        return ScenarioError
    if name in __all__:
        from sim import api

        return getattr(api, name)
    raise AttributeError(f"module 'sim' has no attribute {name!r}")
