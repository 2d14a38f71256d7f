"""All families: fit, apply the rules, write sim/cost/profiles and docs/profiles.md.

python -m calibration.fit.all [FOLDER] [--plots FOLDER]
"""

from __future__ import annotations

from pathlib import Path

from calibration.fit.attention import fit_attention
from calibration.fit.collectives import fit_collectives
from calibration.fit.command import parse
from calibration.fit.copies import fit_copies
from calibration.fit.evidence import REPOSITORY, FamilyFit
from calibration.fit.gemm import fit_gemm
from calibration.fit.memory import fit_memory
from calibration.fit.optimizer import fit_optimizer
from calibration.fit.plots import draw
from calibration.fit.profiles import write_figures
from calibration.fit.rules import apply_rules
from calibration.fit.table import page

FAMILIES = (fit_gemm, fit_attention, fit_memory, fit_optimizer, fit_collectives, fit_copies)
PAGE = REPOSITORY / "docs" / "profiles.md"


def fit_all(folder: Path) -> list[FamilyFit]:
    """Every family's fit, then what follows by rule; later results replace figures of the same name."""
    fits = [family(folder) for family in FAMILIES]
    return [*fits, apply_rules(folder, fits)]


def main(arguments: list[str] | None = None) -> None:
    folder, plots = parse("Fit all families and write the cost profiles.", arguments)
    results = fit_all(folder)
    write_figures(results)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(results), encoding="utf-8")
    print(page(results))
    if plots:
        for result in results:
            draw(result, plots)


if __name__ == "__main__":
    main()
