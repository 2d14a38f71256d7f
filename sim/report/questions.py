"""Questions that name a GPU instead of a scenario."""

from __future__ import annotations

from difflib import get_close_matches

from rich.table import Table

from sim.cost.model import CostModel
from sim.hardware.catalogue import UnknownGpu, find_gpu, gpu_aliases
from sim.report.console import make_console
from sim.report.errors import RunError


def cost_of(gpu: str, profile: str | None) -> CostModel:
    """Prices of a GPU by name. Raises RunError for an unknown GPU, CostError for an unknown profile."""
    try:
        return CostModel.for_gpu(find_gpu(gpu), profile)
    except UnknownGpu:
        near = get_close_matches(gpu, gpu_aliases(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise RunError(f"--gpu {gpu}: no such GPU{hint}; `python -m sim gpus` lists them") from None


def print_table(table: Table) -> None:
    make_console().print(table)
