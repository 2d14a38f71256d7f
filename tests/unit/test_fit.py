"""The fitting scripts give back the parameters that made their data, and write what they fitted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from calibration.fit.all import fit_all, main
from calibration.fit.attention import chart_ratio, fit_attention, form_of
from calibration.fit.attention_time import Heads, attention_ns
from calibration.fit.collectives import fit_collectives
from calibration.fit.copies import fit_copies
from calibration.fit.evidence import Errors, FamilyFit, held_out, spread
from calibration.fit.gemm import fit_gemm
from calibration.fit.gemm import form_of as gemm_form_of
from calibration.fit.gemm_time import Products, gemm_ns
from calibration.fit.memory import fit_memory
from calibration.fit.optimizer import fit_optimizer
from calibration.fit.plots import draw
from calibration.fit.profiles import as_yaml, profile_texts, write_figures
from calibration.fit.rates import SHIPPED
from calibration.fit.table import as_markdown
from sim.cost.figures import Figure
from sim.cost.profile import flatten
from sim.program.kernels import Attention, Gemm
from tests.unit import fit_fixtures as made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_all(tmp_path_factory.mktemp("kernels"))


def values(result: FamilyFit, profile: str) -> dict[str, float]:
    return {name: figure.value for name, figure in result.figures[profile].items()}


def test_the_gemm_script_recovers_its_parameters(folder: Path) -> None:
    result = fit_gemm(folder)
    for profile in ("a100-sxm-80", "h100-sxm", "h200-sxm", "b200-sxm", "gb200", "l40s"):
        found = values(result, profile)
        assert found["single_source.gemm.efficiency"] == pytest.approx(made.GEMM["efficiency"], rel=0.02)
        for name in ("k_overhead", "fixed_us", "bandwidth_efficiency"):
            assert found[f"gemm.{name}"] == pytest.approx(made.GEMM[name], rel=0.05), (profile, name)
    h100 = values(result, "h100-sxm")  # the file's rate of 8 bit, moved as that of 16 bit is
    assert h100["gemm.fp8.efficiency"] == pytest.approx(SHIPPED["h100-sxm"].value, rel=0.05)
    assert h100["gemm.fp8.k_overhead"] == pytest.approx(made.GEMM["k_overhead"], rel=0.1)
    assert h100["gemm.fp8.fixed_us"] == h100["gemm.fixed_us"]
    assert values(result, "gh200")["single_source.gemm.efficiency"] == pytest.approx(made.GEMM["efficiency"], rel=0.02)
    for profile in ("a100-pcie", "b200-sxm"):
        assert values(result, profile)["gemm.accumulate_rate"] == pytest.approx(made.ACCUMULATE_RATE, rel=0.02)


def test_a_source_that_was_not_fitted_shows_its_distance(folder: Path) -> None:
    rows = [row for row in fit_gemm(folder).rows if row.what == "Vidur, eager, M >= 1024"]
    assert len(rows) == 2
    for row in rows:
        assert row.kind == "other source"
        assert row.errors.scale == pytest.approx(made.EAGER_SLOWDOWN, rel=0.01)


def test_the_attention_script_recovers_its_parameters(folder: Path) -> None:
    result = fit_attention(folder)
    for profile, root in (("h200-sxm", "single_source.attention.flash3.d128"), ("l40s", "attention.flash2.d64")):
        found = values(result, profile)
        for name, value in made.ATTENTION.items():
            assert found[f"{root}.{name}"] == pytest.approx(value, rel=0.03), (profile, name)
    for profile, generation in (("a100-sxm-80", "flash2"), ("h100-sxm", "flash2"), ("h100-sxm", "flash3")):
        found = values(result, profile)
        for name, value in made.CHART.items():
            assert found[f"attention.{generation}.d128.{name}"] == pytest.approx(value, rel=0.03), (profile, name)
    math = values(result, "h100-sxm")
    for name in ("efficiency", "masked_share"):
        assert math[f"attention.math.d64.{name}"] == pytest.approx(made.MATH[name], rel=0.1)


def test_training_kernels_give_rates_of_both_kinds_of_heads_and_their_ratio_goes_to_other_cards(folder: Path) -> None:
    result = fit_attention(folder)
    b200, h100 = values(result, "b200-sxm"), values(result, "h100-sxm")
    assert b200["attention.cudnn.d128.efficiency"] == pytest.approx(made.CHART["efficiency"], rel=0.03)
    assert b200["attention.cudnn.d192.efficiency"] == pytest.approx(
        made.WIDE_SHARE * made.CHART["efficiency"], rel=0.03
    )
    assert b200["single_source.attention.cudnn.d128.efficiency"] == pytest.approx(
        made.ATTENTION["efficiency"], rel=0.03
    )
    carried = h100["attention.flash3.d192.efficiency"] / h100["attention.flash3.d128.efficiency"]
    assert carried == pytest.approx(made.WIDE_SHARE, rel=0.02)
    assert result.figures["h100-sxm"]["attention.flash3.d192.efficiency"].label == "scaled"


def test_the_backward_ratio_comes_from_charts_of_forward_and_of_both(folder: Path) -> None:
    # The fixed time and the bytes, which a rate hides, move it a little.
    assert chart_ratio(folder, "fa2") == pytest.approx(0.83, rel=0.08)
    assert chart_ratio(folder, "standard") == pytest.approx(made.MATH["backward_rate_ratio"], rel=0.15)


def test_the_memory_script_recovers_its_parameters(folder: Path) -> None:
    result = fit_memory(folder)
    a100, h100 = values(result, "a100-sxm-80"), values(result, "h100-sxm")
    for family in ("elementwise", "norm_forward", "softmax", "fused_softmax", "embedding", "dropout"):
        assert a100[f"memory.{family}.bandwidth_efficiency"] == pytest.approx(made.ETA, rel=0.02)
    assert h100["memory.copy.bandwidth_efficiency"] == pytest.approx(made.ETA, rel=0.02)
    assert result.figures["h100-sxm"]["memory.copy.bandwidth_efficiency"].label == "scaled"
    assert all(row.errors.p90 < 0.03 for row in result.rows)
    assert "t0 4 us" in result.rows[-1].what


def test_the_optimizer_script_recovers_its_share(folder: Path) -> None:
    found = values(fit_optimizer(folder), "a100-sxm-80")["single_source.memory.optimizer.bandwidth_efficiency"]
    assert found == pytest.approx(30 / (made.PICOSECONDS_PER_PARAMETER * 1e-12) / 2039e9, rel=0.01)


def test_the_collectives_script_recovers_both_protocols(folder: Path) -> None:
    result = fit_collectives(folder)
    for profile, kind, ranks in (("a100-sxm-80", "all_gather", 8), ("b200-sxm", "all_to_all", 2)):
        found = values(result, profile)
        root = f"collective.{kind}.n{ranks}"
        low = (found[f"{root}.low_latency_us"], found[f"{root}.low_latency_gb_per_s"])
        high = (found[f"{root}.bandwidth_us"], found[f"{root}.bandwidth_gb_per_s"])
        assert low == pytest.approx(made.LOW, rel=0.03)
        assert high == pytest.approx(made.HIGH, rel=0.03)
    sends = values(result, "h100-sxm")
    assert (sends["p2p.node_latency_us"], sends["p2p.node_gb_per_s"]) == pytest.approx(made.SEND, rel=0.02)


def test_the_copies_script_takes_the_largest_copy_and_reports_the_fixed_time(folder: Path) -> None:
    result = fit_copies(folder)
    assert values(result, "gh200")["copy.device_to_host_gb_per_s"] == pytest.approx(made.COPY[1], rel=0.01)
    assert "25 GB/s + 12 us" in result.rows[0].what


def test_everything_fitted_is_written_and_read_back(folder: Path, tmp_path: Path) -> None:
    results = fit_all(folder)
    texts = profile_texts(results)
    write_figures(results, folder=tmp_path)
    assert {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.yaml")} == texts
    assert "0.0" in as_markdown(results[0].rows)
    assert draw(results[4], tmp_path) == tmp_path / "collectives.png"
    assert draw(results[-1], tmp_path) is None


def test_a_missing_folder_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no/such/folder"])
    assert "no/such/folder: no such folder" in capsys.readouterr().err


def test_a_profile_that_is_no_longer_given_is_removed(tmp_path: Path) -> None:
    (tmp_path / "old-card.yaml").write_text("description: gone\n", encoding="utf-8")
    write_figures([], folder=tmp_path)
    assert not (tmp_path / "old-card.yaml").exists()


def test_a_written_profile_says_evidence_once_and_reads_back_equal() -> None:
    from ruamel.yaml import YAML

    long = "measured by somebody with a name so long that the line must be folded, " * 3
    shared = {f"gemm.{name}": Figure(i + 0.5, "published", "them", "1.0/2.0 %", 0.1) for i, name in enumerate("abc")}
    figures = {**shared, "gemm.d": Figure(1e-5, "assumed", long.strip()), "link.x": Figure(3, "scaled", 'a "quote"')}
    text = as_yaml({"description": "A card: 80 GB", "gpus": ["card"]}, figures)
    document = YAML(typ="safe", pure=True).load(text)
    assert document["gpus"] == ["card"]
    assert dict(flatten("card", {key: document[key] for key in ("gemm", "link")})) == figures
    assert text.count("them") == 1
    assert max(map(len, text.splitlines())) <= 120


def test_the_gemm_times_of_tables_equal_the_cost_form() -> None:
    form = gemm_form_of("h100-sxm-80gb", made.GEMM)
    shapes = [
        (1, 8192, 8192, 1),
        (300, 5000, 640, 1),
        (4096, 4096, 4096, 1),
        (1024, 1024, 128, 64),
        (64, 64, 20_000, 1),
    ]
    rows = pd.DataFrame(shapes, columns=["m", "n", "k", "batch"])
    for dtype in ("bf16", "fp8", "fp32"):
        for accumulate in (False, True):
            expected = [form.time(Gemm(m, n, k, dtype, b, accumulate)).total_ns for m, n, k, b in shapes]
            assert gemm_ns(form, Products.of(rows, dtype, accumulate)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("masked_share", [0.0, 1.6])
def test_the_attention_times_of_tables_equal_the_cost_form(masked_share: float) -> None:
    form = form_of("h100-sxm-80gb", {**made.ATTENTION, "masked_share": masked_share})
    shapes = [(1, 100, 1, 1, 64), (2, 1000, 8, 2, 128), (1, 4096, 32, 8, 60), (16, 128, 32, 32, 256)]
    for causal in (False, True):
        rows = pd.DataFrame(shapes, columns=["b", "s", "h", "hkv", "d"]).assign(causal=causal)
        for backward in (False, True):
            works = [Attention(b, h, hkv, s, s, d, causal, backward) for b, s, h, hkv, d in shapes]
            expected = [form.time(work).total_ns for work in works]
            assert attention_ns(form, Heads.of(rows), backward) == pytest.approx(expected, rel=1e-12)


def test_half_of_the_points_are_held_out_and_always_the_same() -> None:
    mask = held_out(101)
    assert mask.sum() == 50
    assert (mask == held_out(101)).all()
    assert (mask != held_out(101, seed=1)).any()


def test_errors_and_spread_as_by_hand() -> None:
    errors = Errors.of([1.0, 1.0, 1.0], [1.0, 1.25, 0.8])
    assert (errors.count, errors.median, errors.scale) == (3, pytest.approx(0.2), 1.0)
    assert str(Errors(3, 0.05, 0.1234, 1.0)) == "5.0/12.3 %"
    assert spread([np.e**0.2, np.e**-0.2], 1.0) == 0.2
    assert spread([1.0], 1.0) == 0.03
