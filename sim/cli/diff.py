"""The verb `sim diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.errors import answers_errors


def diff(
    run: Annotated[Path, typer.Argument(help="The folder of one simulated strategy, e.g. out/fsdp_ckpt/full.")],
    trace: Annotated[Path, typer.Argument(help="A trace of torch.profiler (.json, .json.gz), or a folder of ranks.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Put a simulated step beside a profiled one: step, compute, exposed communication, idle, families of kernels.

    Example: python -m sim diff out/fsdp_ckpt/full trace.json.gz
    """
    with answers_errors():
        from sim.report.console import make_console
        from sim.report.diff import diff_json, diff_of, show_diff

        found, remarks = diff_of(run, trace)
        if as_json:
            print(diff_json(found, remarks))
        else:
            show_diff(make_console(), found, remarks)
