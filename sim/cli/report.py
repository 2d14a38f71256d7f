"""The verb `sim report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.errors import answers_errors


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or strategies, or scenario files.")],
    html: Annotated[bool, typer.Option("--html", help="One self-contained page (the only form).")] = True,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="STRATEGY", help="Show this one; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the pages go.")] = Path("out"),
) -> None:
    """Write one interactive page per run: memory and streams over the step with a cursor, strategies, explorers.

    The page needs no network and no server. Strategies are played again from the scenario that a run has left.

    Example: python -m sim report out/fsdp_ckpt --html
    """
    with answers_errors():
        from sim.report.page.write import write_page

        for run in runs:
            print(f"Page: {write_page(run, out, only or [])}")
