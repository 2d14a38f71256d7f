from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sim.cost.figures import CostError
from sim.cost.gemm import GemmForm
from sim.cost.profile import load_profile
from sim.program.kernels import Gemm
from tests.unit.cost_fixtures import A100, H100, TEN_SMS, FakeGpu, measured

PLAIN = GemmForm(
    gpu=TEN_SMS, efficiency=0.5, tile_edge_cost=0.0, k_overhead=0.0, fixed_ns=1000.0, bandwidth_efficiency=1.0
)
"""500 FLOP/ns per SM, no cost of tile edges or K, 1 us, full bandwidth."""


def shipped(profile: str, gpu: FakeGpu) -> GemmForm:
    return GemmForm.of(load_profile(profile).figures, gpu)


def test_the_fastest_tiling_is_the_one_worked_out_by_hand() -> None:
    # 256 x 256 x 2048 on 10 SMs: 16 tiles of 64 x 64, K split by 8 = 128 tiles in 13 waves of 2*64*64*256/500 ns,
    # and 8 partial fp32 sums written and read: 8 * 8 * 65536 bytes at 1000 bytes/ns. Without a split, 16 tiles take
    # 2 waves of 2*64*64*2048/500, 67,109 ns.
    time = PLAIN.time(Gemm(m=256, n=256, k=2048))
    by_hand = 13 * 2 * 64 * 64 * 256 / 500 + 8 * 8 * 65536 / 1000
    assert by_hand < 67_108
    assert (time.tile_m, time.tile_n, time.split_k, time.tiles, time.waves) == (64, 64, 8, 128, 13)
    assert time.tensor_ns == pytest.approx(by_hand, rel=1e-12)
    assert time.total_ns == pytest.approx(1000 + by_hand, rel=1e-12)
    assert time.bound == "tensor cores"


def test_tile_edges_and_k_overhead_enter_as_written() -> None:
    # One 64 x 64 tile on each of the 10 SMs.
    form = replace(PLAIN, tile_edge_cost=8.0, k_overhead=100.0)
    rate = 500 * (1 + 8 * (1 / 256 + 1 / 128))
    by_hand = 2 * 64 * 64 * (64 + 100) * (1 + 8 * (2 / 64)) / rate
    assert form.time(Gemm(m=64, n=640, k=64)).tensor_ns == pytest.approx(by_hand, rel=1e-12)


def test_a_skinny_product_takes_the_time_of_its_bytes() -> None:
    work = Gemm(m=1, n=8192, k=8192)
    bytes_moved = 2 * (8192 + 8192 * 8192 + 8192)
    form = replace(PLAIN, gpu=H100, bandwidth_efficiency=0.8)
    assert form.time(work).bytes == bytes_moved
    assert form.time(work).bound == "memory"
    assert form.time(work).total_ns == pytest.approx(1000 + bytes_moved / (0.8 * 3350), rel=1e-12)


def test_a_partly_filled_wave_costs_as_much_as_a_full_one() -> None:
    # 9, 10 and 11 tiles on 10 SMs; so short a K that splitting it does not pay.
    form = replace(PLAIN, k_overhead=10_000.0)
    nine, ten, eleven = (form.time(Gemm(m=64, n=64 * tiles, k=64)).tensor_ns for tiles in (9, 10, 11))
    assert nine == ten == pytest.approx(2 * 64 * 64 * 10_064 / 500, rel=1e-12)
    assert eleven == pytest.approx(2 * ten, rel=1e-12)


def test_a_batch_multiplies_the_tiles_and_the_bytes() -> None:
    one, eight = (PLAIN.time(Gemm(m=256, n=256, k=256, batch=b)) for b in (1, 8))
    assert eight.bytes == 8 * one.bytes
    assert eight.tiles % 8 == 0
    full = [PLAIN.time(Gemm(m=2560, n=2560, k=512, batch=b)).tensor_ns for b in (1, 2, 4)]
    assert full[1] == pytest.approx(2 * full[0], rel=0.02)
    assert full[2] == pytest.approx(4 * full[0], rel=0.02)


def test_accumulation_reads_the_output_too() -> None:
    plain, added = (PLAIN.time(Gemm(m=64, n=64, k=64, accumulate=a)).bytes for a in (False, True))
    assert added - plain == 2 * 64 * 64


def test_adding_into_the_output_is_slower_by_its_rate() -> None:
    form, work = replace(PLAIN, accumulate_rate=0.95), Gemm(m=2560, n=2560, k=4096)
    plain, added = (form.time(replace(work, accumulate=a)).tensor_ns for a in (False, True))
    assert added == pytest.approx(plain / 0.95, rel=1e-12)


@pytest.mark.parametrize(
    ("work", "slow"),
    [
        (Gemm(1024, 1024, 80, batch=64), False),
        (Gemm(1024, 1024, 84, batch=64), True),
        (Gemm(1024, 84, 1024, batch=64), True),
        (Gemm(1024, 1024, 84, "fp32", batch=64), False),
    ],
)
def test_only_batched_16_bit_products_with_a_side_off_8_are_slowed(work: Gemm, slow: bool) -> None:
    plain, form = replace(PLAIN, misaligned_slowdown=1.0), replace(PLAIN, misaligned_slowdown=8.0)
    assert form.time(work).tensor_ns == (8 if slow else 1) * plain.time(work).tensor_ns


@pytest.mark.parametrize(
    ("work", "slow"),
    [
        (Gemm(4096, 50257, 1024), True),  # a head's logits,
        (Gemm(4096, 1024, 50257), True),  # its input's gradient
        (Gemm(50257, 1024, 4096, over_rows=True), True),  # and its weight's
        (Gemm(4096, 50304, 1024), False),
        (Gemm(4099, 1024, 1024), False),  # tokens are no row's length
        (Gemm(1024, 1024, 4099, over_rows=True), False),
        (Gemm(4096, 50257, 1024, "fp32"), False),
    ],
)
def test_a_single_16_bit_product_is_slowed_where_its_rows_are_off_8(work: Gemm, slow: bool) -> None:
    form = replace(PLAIN, misaligned_slowdown=8.0, misaligned_row_slowdown=3.0)
    plain = replace(form, misaligned_row_slowdown=1.0)
    assert form.time(work).tensor_ns == pytest.approx((3 if slow else 1) * plain.time(work).tensor_ns, rel=0.01)


def test_fp8_has_figures_of_its_own_where_it_was_measured() -> None:
    figures = load_profile("h100-sxm").figures
    assert GemmForm.of(figures, H100, "fp8").efficiency == figures["gemm.fp8.efficiency"]
    assert GemmForm.of(load_profile("a100-sxm-80").figures, A100, "fp8").efficiency == 0.8


def test_full_fp32_uses_the_fp32_peak_and_not_tf32() -> None:
    form, share = shipped("h100-sxm", H100), 66.9 / 989.4
    bf16, fp32 = (form.time(Gemm(8192, 8192, 8192, d)).tensor_ns for d in ("bf16", "fp32"))
    steps = (8192 + form.k_overhead * share) / (8192 + form.k_overhead)
    assert fp32 / bf16 == pytest.approx(steps / share, rel=1e-9)


@pytest.mark.parametrize(
    "work", [Gemm(8192, 8192, 16, "fp32"), Gemm(8192, 16, 8192, "fp32"), Gemm(16, 8192, 8192, "fp32")]
)
def test_an_adapters_fp32_products_take_about_what_their_bytes_take(work: Gemm) -> None:
    """Tiles as narrow as cuBLAS's, and an overhead that is a time: neither makes 16 columns as dear as 64."""
    time = shipped("h100-sxm", H100).time(work)
    assert time.tensor_ns < 1.5 * time.memory_ns
    wide = shipped("h100-sxm", H100).time(replace(work, dtype="bf16"))
    assert wide.tile_m >= 64 and wide.tile_n >= 64


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(CostError, match="ten-sms has no fp16 peak"):
        PLAIN.time(Gemm(64, 64, 64, "fp16"))


@pytest.mark.parametrize(("profile", "gpu"), [("h100-sxm", H100), ("a100-sxm-80", A100)])
def test_more_work_never_takes_less_time_and_no_rate_exceeds_the_peak(profile: str, gpu: FakeGpu) -> None:
    form = shipped(profile, gpu)
    sizes = (8, 64, 104, 256, 1000, 4096, 20_000)  # aligned
    for m in sizes:
        for n in sizes:
            times = [form.time(Gemm(m, n, k)).total_ns for k in sizes]
            assert times == sorted(times)
            for k, ns in zip(sizes, times):
                assert 2 * m * n * k / ns * 1e9 <= gpu.peak_flops_per_s("bf16")


def test_a_large_product_approaches_the_profiles_efficiency() -> None:
    work = Gemm(32_768, 32_768, 32_768)
    rate = work.flops / shipped("h100-sxm", H100).time(work).total_ns * 1e9
    efficiency = load_profile("h100-sxm").figures["gemm.efficiency"]
    assert 0.97 * efficiency < rate / 989.4e12 < 1.03 * efficiency


def errors_on_file(form: GemmForm, gpu: str, every: int) -> np.ndarray:
    """|predicted / measured - 1| on the train region (M >= 1024, N, K >= 512) of the bf16 file, every n-th row."""
    rows = pd.read_csv(measured("gemm.csv.gz")).query(
        f"gpu == '{gpu}' and dtype == 'bfloat16' and m >= 1024 and n >= 512 and k >= 512"
    )[::every]
    predicted = np.array([form.time(Gemm(r.m, r.n, r.k)).total_ns for r in rows.itertuples()])
    return np.abs(predicted / (rows.us.to_numpy() * 1e3) - 1)


@pytest.mark.parametrize(
    ("profile", "gpu", "file_gpu", "fitted_efficiency", "published_median"),
    [("h100-sxm", H100, "h100_sxm", 0.875, 0.043), ("a100-sxm-80", A100, "a100_sxm", 0.907, 0.047)],
)
def test_with_the_files_own_rate_the_form_reproduces_the_published_fit(
    profile: str, gpu: FakeGpu, file_gpu: str, fitted_efficiency: float, published_median: float
) -> None:
    form = replace(shipped(profile, gpu), efficiency=fitted_efficiency)
    assert abs(np.median(errors_on_file(form, file_gpu, every=5)) - published_median) < 0.01


def test_the_h100_rate_that_ships_stays_near_the_fastest_file() -> None:
    median = np.median(errors_on_file(shipped("h100-sxm", H100), "h100_sxm", every=5))
    print(f"H100 GEMM, shipped rate, median error {median:.1%}")
    assert median < 0.1
