"""Command line of one family's script: fit, print the table, write that family's figures, draw."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from calibration.fit.evidence import FamilyFit, data_folder
from calibration.fit.plots import draw
from calibration.fit.profiles import write_figures
from calibration.fit.table import as_markdown


def main(fit_family: Callable[[Path], FamilyFit], arguments: list[str] | None = None) -> FamilyFit:
    """Run one family; its figures replace those of the same names in the profiles."""
    folder, plots = parse(fit_family.__doc__ or "", arguments)
    result = fit_family(folder)
    write_figures([result], keep_others=True)
    print(as_markdown(result.rows))
    if plots:
        draw(result, plots)
    return result


def parse(description: str, arguments: list[str] | None) -> tuple[Path, Path | None]:
    """The data folder, and the folder for plots if one is asked for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", nargs="?", help="folder of the csv files (default: shared/data/kernels)")
    parser.add_argument("--plots", type=Path, help="folder for PNG files, measured against fitted")
    given = parser.parse_args(arguments)
    folder = data_folder(given.folder)
    if not folder.is_dir():
        parser.error(f"{folder}: no such folder; name the folder of the csv files of kernel measurements")
    return folder, given.plots
