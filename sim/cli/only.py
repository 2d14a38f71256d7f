"""Strategies by the names that --only gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.cli.errors import stop

if TYPE_CHECKING:
    from sim.scenario.setup import Setup


def chosen(setups: Sequence[Setup], names: Sequence[str]) -> list[Setup]:
    """The strategies of those names, in the scenario's order; all where no name is given."""
    known = [setup.name for setup in setups]
    for name in names:
        if name not in known:
            from sim.scenario.problems import nearest_name

            near = nearest_name(name, known)
            stop(f"--only {name}: one of {', '.join(known)}{f' (did you mean {near}?)' if near else ''}")
    return [setup for setup in setups if not names or setup.name in names]
