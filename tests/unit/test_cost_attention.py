from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sim.cost.attention import AttentionForm
from sim.cost.figures import CostError
from sim.cost.profile import load_profile
from sim.program.kernels import Attention
from tests.unit.cost_fixtures import A100, H100, TEN_SMS, FakeGpu, measured

FORM = AttentionForm(
    gpu=TEN_SMS,
    efficiency=0.5,
    fixed_ns=1000.0,
    bandwidth_efficiency=1.0,
    tail_share=0.0,
    backward_rate_ratio=0.83,
)


def attention(**changes: object) -> Attention:
    causal = Attention(batch=2, heads=5, kv_heads=5, q_len=384, kv_len=384, head_dim=64, causal=True, backward=False)
    return replace(causal, **changes)  # type: ignore[arg-type]


def test_causal_tiles_are_summed_and_the_bytes_added_as_by_hand() -> None:
    # Three tiles of 128 rows see 128, 256 and 384 keys; 500 FLOP/ns per SM; 10 heads on 10 SMs. q, k, v and out of
    # 2 x 384 x 5 x 64 elements of 2 bytes at 1000 bytes/ns.
    by_hand = 4 * 128 * 64 * (128 + 256 + 384) / 500 + 4 * 2 * 384 * 5 * 64 * 2 / 1000
    time = FORM.time(attention())
    assert time.tiles == 30
    assert time.total_ns == pytest.approx(1000 + by_hand, rel=1e-12)
    assert time.bound == "tensor cores"


def test_without_a_mask_every_tile_sees_all_keys() -> None:
    by_hand = 4 * 128 * 64 * 3 * 384 / 500
    assert FORM.time(attention(causal=False)).work_ns == pytest.approx(by_hand, rel=1e-12)


def test_a_kernel_that_computes_masked_keys_pays_for_them() -> None:
    # Behind the diagonal of the three tiles lie 256 + 128 + 0 keys.
    by_hand = 4 * 128 * 64 * (128 + 256 + 384 + 1.5 * (256 + 128)) / 500
    assert replace(FORM, masked_share=1.5).time(attention()).work_ns == pytest.approx(by_hand, rel=1e-12)


def test_a_window_bounds_the_keys_of_a_tile_and_is_counted_by_query() -> None:
    # 200 keys before the tile's last row and 127 more before its first: the third of three tiles sees 327 of 384 keys.
    by_hand = 4 * 128 * 64 * (128 + 256 + 327) / 500
    assert FORM.time(attention(window=200)).work_ns == pytest.approx(by_hand, rel=1e-12)
    assert FORM.time(attention(window=384)).work_ns == FORM.time(attention()).work_ns


@pytest.mark.parametrize("window", [1, 128, 383])
def test_flops_of_a_window_are_those_of_its_pairs(window: int) -> None:
    """Where the causal half of S x S pairs counts as S^2 / 2, those outside the window are a triangle of S - W."""
    pairs = (384**2 - (384 - window) ** 2) / 2
    assert attention(window=window).flops == 4 * 2 * 5 * 64 * pairs
    assert attention(window=500).flops == attention().flops


def test_a_single_head_waits_for_its_longest_tile() -> None:
    time = FORM.time(attention(batch=1, heads=1, kv_heads=1))
    assert time.longest_tile_ns == pytest.approx(4 * 128 * 64 * 384 / 500, rel=1e-12)
    assert time.bound == "longest tile"


def test_a_tail_adds_a_share_of_the_smaller_part() -> None:
    plain, tail = (replace(FORM, tail_share=share).time(attention()) for share in (0.0, 0.5))
    assert plain.work_ns > plain.longest_tile_ns
    assert tail.total_ns - plain.total_ns == pytest.approx(0.5 * plain.longest_tile_ns, rel=1e-12)


def test_a_head_dimension_is_padded_to_a_multiple_of_eight() -> None:
    assert FORM.time(attention(head_dim=57)).work_ns == FORM.time(attention(head_dim=64)).work_ns


def test_backward_takes_three_times_the_forward() -> None:
    forward, backward = (FORM.time(attention(backward=b)).work_ns for b in (False, True))
    assert backward / forward == pytest.approx(2.5 / 0.83, rel=1e-12)


def test_fewer_key_value_heads_save_bytes_and_no_work() -> None:
    full, grouped = FORM.time(attention()), FORM.time(attention(kv_heads=1))
    assert grouped.work_ns == full.work_ns
    assert grouped.bytes < full.bytes


@pytest.mark.parametrize("generation", ["flash2", "flash3", "efficient", "triton", "math"])
def test_longer_sequences_take_longer_and_no_rate_exceeds_the_peak(generation: str) -> None:
    lengths = (1, 64, 128, 129, 1024, 4096, 16_384)
    works = [attention(heads=32, kv_heads=8, q_len=s, kv_len=s, head_dim=128, generation=generation) for s in lengths]
    times = [AttentionForm.of(load_profile("h100-sxm").figures, H100, w).time(w).total_ns for w in works]
    assert times == sorted(times)
    assert all(w.flops / ns * 1e9 < 989.4e12 for w, ns in zip(works, times))


def test_an_odd_head_dimension_takes_the_figures_of_the_next_larger() -> None:
    figures = load_profile("h100-sxm").figures
    efficiencies = [AttentionForm.of(figures, H100, attention(head_dim=d)).efficiency for d in (32, 64, 80, 128, 256)]
    d64, d128 = (figures[f"attention.flash2.d{d}.efficiency"] for d in (64, 128))
    assert efficiencies == [d64, d64, d128, d128, d128]


def test_a_generation_without_figures_is_refused_with_those_that_have_some() -> None:
    work = attention(generation="flash3")
    with pytest.raises(
        CostError, match=r"'flash3' in a100-sxm-80: one of efficient, flash2, math, triton \(did you mean flash2"
    ):
        AttentionForm.of(load_profile("a100-sxm-80").figures, A100, work)


@pytest.mark.parametrize(
    ("profile", "gpu", "file_gpu", "head_dim", "worst"),
    [
        ("a100-sxm-80", A100, "a100_sxm", 64, 0.06),
        ("a100-sxm-80", A100, "a100_sxm", 128, 0.08),
        ("h100-sxm", H100, "h100_sxm", 64, 0.06),
        ("h100-sxm", H100, "h100_sxm", 128, 0.06),
    ],
)
def test_the_readme_charts_come_out(profile: str, gpu: FakeGpu, file_gpu: str, head_dim: int, worst: float) -> None:
    """Forward + backward of 16k tokens and 2,048 channels."""
    rows = pd.read_csv(measured("attn_flash_readme.csv")).query(
        f"gpu == '{file_gpu}' and impl == 'fa2' and dir == 'fwdbwd' and head_dim == {head_dim}"
    )
    errors = []
    for row in rows.itertuples():
        heads = 2048 // head_dim
        forward = Attention(
            16_384 // row.seqlen, heads, heads, row.seqlen, row.seqlen, head_dim, row.causal == 1, False
        )
        form = AttentionForm.of(load_profile(profile).figures, gpu, forward)
        pair_ns = sum(form.time(w).total_ns for w in (forward, replace(forward, backward=True)))
        errors.append(abs(3.5 * forward.flops / pair_ns / 1e3 / row.tflops - 1))
    print(f"{file_gpu} head_dim {head_dim}: median {np.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)}")
    assert np.median(errors) < 0.025
    assert max(errors) < worst
