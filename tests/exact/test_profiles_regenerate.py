"""The committed cost profiles are what the fitting scripts write from the published kernel measurements."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from calibration.fit.all import PAGE, fit_all
from calibration.fit.evidence import FamilyFit, data_folder
from calibration.fit.profiles import FOLDER, profile_texts
from calibration.fit.table import page
from sim.cost.figures import Figure
from sim.cost.profile import HEADER, flatten


@pytest.fixture(scope="module")
def results() -> list[FamilyFit]:
    folder = data_folder()
    if not (folder / "gemm.csv.gz").exists():
        pytest.skip(f"published kernel measurements not present: {folder.name}")
    return fit_all(folder)


def figures_of(name: str, text: str) -> dict[str, Figure]:
    document = YAML(typ="safe", pure=True).load(text)
    return dict(flatten(name, {key: value for key, value in document.items() if key not in HEADER}))


def test_the_committed_profiles_are_what_the_scripts_write(results: list[FamilyFit]) -> None:
    """Values within 1 %: another scipy may end a search elsewhere in the last digits; all else equal."""
    texts = profile_texts(results)
    assert sorted(texts) == sorted(path.stem for path in FOLDER.glob("*.yaml"))
    for name, text in texts.items():
        committed = figures_of(name, (FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        written = figures_of(name, text)
        assert {n: f.label for n, f in written.items()} == {n: f.label for n, f in committed.items()}, name
        for figure_name, figure in written.items():
            assert figure.value == pytest.approx(committed[figure_name].value, rel=0.01), (name, figure_name)


def test_the_committed_table_has_the_rows_that_the_scripts_find(results: list[FamilyFit]) -> None:
    def rows(text: str) -> list[str]:
        return [" | ".join(line.split("|")[1:2]) for line in text.splitlines() if line.startswith("| ")]

    assert rows(page(results)) == rows(PAGE.read_text(encoding="utf-8"))


KNOWN = [
    ("gemm", "a100-sxm-80", "bf16, M", 5.0, 14.6),
    ("gemm", "h100-sxm", "bf16, M", 4.3, 12.6),
    ("gemm", "h200-sxm", "bf16, M", 3.5, 12.7),
    ("gemm", "b200-sxm", "bf16, M", 6.5, 16.7),
    ("gemm", "gb200", "bf16, M", 8.5, 19.2),
    ("gemm", "l40s", "bf16, M", 8.7, 20.5),
    ("attention", "a100-sxm-80", "flash_attn forward, d128", 4.3, 17.0),
    ("attention", "h100-sxm", "flash_attn_fa3 forward, d64", 5.7, 25.5),
    ("attention", "h100-sxm", "flash_attn_fa3 forward, d128", 6.1, 20.5),
    ("attention", "h200-sxm", "flash_attn_fa3 forward, d64", 6.3, 23.7),
    ("attention", "h200-sxm", "flash_attn_fa3 forward, d128", 5.9, 17.6),
    ("attention", "b200-sxm", "flashinfer_trtllmprefill forward, d64", 9.6, 26.0),
    ("attention", "b200-sxm", "flashinfer_trtllmprefill forward, d128", 9.1, 23.0),
    ("attention", "gb200", "flashinfer_trtllmprefill forward, d64", 10.6, 25.9),
    ("attention", "gb200", "flashinfer_trtllmprefill forward, d128", 12.9, 26.4),
    ("attention", "l40s", "flash_attn_fa2 forward, d64", 4.8, 14.2),
    ("attention", "l40s", "flash_attn_fa2 forward, d128", 6.2, 17.8),
    ("collectives", "a100-sxm-80", "all-gather", 5.1, 16.5),
    ("collectives", "h100-sxm", "all-gather", 4.3, 12.1),
    ("collectives", "h200-sxm", "all-gather", 4.3, 12.2),
    ("collectives", "b200-sxm", "all-gather", 4.5, 15.0),
    ("collectives", "a100-sxm-80", "the same, 4 MB", 3.8, 12.0),
    ("collectives", "h100-sxm", "the same, 4 MB", 3.3, 8.0),
    ("collectives", "h200-sxm", "the same, 4 MB", 2.4, 7.0),
    ("collectives", "b200-sxm", "the same, 4 MB", 5.8, 24.0),
]
"""Errors in %, median and 90th percentile, of earlier fits of these files: COSTS.md 2 and 5 on its own held-out points;
for products the parameters of COSTS.md 1.2 on the points held out here."""
P90_SLACK = 0.8


@pytest.mark.parametrize(("family", "profile", "what", "median", "p90"), KNOWN)
def test_held_out_errors_are_no_worse_than_those_of_the_earlier_fits(
    results: list[FamilyFit], family: str, profile: str, what: str, median: float, p90: float
) -> None:
    """Medians as printed, to .1 %; the 90th percentile of H100's collectives lies .7 % above, others within .2 %."""
    rows = [row for result in results if result.family == family for row in result.rows]
    row = next(r for r in rows if r.profile == profile and r.kind == "held out" and r.what.startswith(what))
    assert round(100 * row.errors.median, 1) <= median
    assert round(100 * row.errors.p90, 1) <= p90 + P90_SLACK
