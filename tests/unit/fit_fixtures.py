"""A folder of tiny csv files with times from the cost forms themselves, so that fits must give the parameters back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.fit import attention, collectives, gemm, gemm_fp8, memory
from calibration.fit.attention_time import Heads, attention_ns
from calibration.fit.gemm_time import Products, gemm_ns
from sim.cost.collective import wire_bytes

GEMM = {
    "efficiency": 0.7,
    "tile_edge_cost": 8.0,
    "k_overhead": 180.0,
    "fixed_us": 3.0,
    "bandwidth_efficiency": 0.75,
}
ACCUMULATE_RATE, EAGER_SLOWDOWN = 0.95, 1.2
ATTENTION = {"efficiency": 0.55, "fixed_us": 8.0, "bandwidth_efficiency": 0.5, "tail_share": 0.4}
CHART = {"efficiency": 0.6, "bandwidth_efficiency": 0.8}
WIDE_SHARE = 0.8
"""Rate of heads of 192 and 128 entries over that of 128."""
MATH = {"efficiency": 0.15, "bandwidth_efficiency": 0.3, "masked_share": 1.5, "backward_rate_ratio": 1.6}
ETA, FIXED_US = 0.7, 4.0
PICOSECONDS_PER_PARAMETER = 20.0
LOW, HIGH = (10.0, 30.0), (40.0, 200.0)
"""Latency in us and GB/s of the two protocols."""
SEND = (9.0, 220.0)
COPY = (12.0, 25.0)


def write_all(folder: Path) -> Path:
    """All csv files that the scripts read."""
    tables = {
        "gemm": _gemm(),
        "gemm_eager": _gemm_eager(),
        "gemm_simumax": _gemm_simumax(),
        "attention_forward": _attention(),
        "attn_flash_readme": _charts(),
        "attn_simumax": _attention_simumax(),
        "operators": pd.concat([_linears(), _memory(), _optimizer(), _flash()]),
        "elementwise": _elementwise(),
        "nccl_aic": _nccl(),
        "collectives_small": _small(),
        "copies": _copies(),
        "mamf": _maximum(),
    }
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def _shapes(least_m: int = 64) -> pd.DataFrame:
    sides = [(m, n, k) for m in (64, 300, 1024, 4096, 10_000) for n in (512, 1536, 5000) for k in (640, 4096, 12_288)]
    return pd.DataFrame([s for s in sides if s[0] >= least_m], columns=["m", "n", "k"])


def _gemm() -> pd.DataFrame:
    parts = []
    for source in gemm.SOURCES:
        for dtype, name in (("bf16", "bfloat16"), ("fp8", "fp8")):
            if dtype == "bf16" or source.fp8_costs:
                work = Products.of(_shapes(), dtype)
                us = gemm.predict_us(source.gpu, work, **GEMM)
                if dtype == "fp8":
                    us = gemm_fp8.predict_us(gemm.form_of(source.gpu, GEMM), work, 6.0, 0.4)
                parts.append(_shapes().assign(gpu=source.file_gpu, dtype=name, us=us, src="test"))
    return pd.concat(parts)


def _gemm_eager() -> pd.DataFrame:
    parts = []
    for name, gpu in (("a100", "a100-sxm-80gb"), ("h100", "h100-sxm-80gb")):
        us = EAGER_SLOWDOWN * gemm.predict_us(gpu, Products.of(_shapes()), **GEMM)
        parts.append(_shapes().assign(gpu=name, us=us))
    return pd.concat(parts)


def _gemm_simumax() -> pd.DataFrame:
    parts = []
    for name, gpu in (("a100_pcie", "a100-pcie-80gb"), ("b200_sxm", "b200-sxm-180gb")):
        for layout in ("TN", "NN", "NT"):
            added = layout == "NT"
            form = replace(gemm.form_of(gpu, GEMM), accumulate_rate=ACCUMULATE_RATE)
            us = gemm_ns(form, Products.of(_shapes(1024), accumulate=added)) / 1e3
            out = "fp32" if added else "bf16"
            parts.append(_shapes(1024).assign(gpu=name, layout=layout, out_dtype=out, b=1, us=us))
    return pd.concat(parts)


def _linears() -> pd.DataFrame:
    parts = []
    for name, gpu in (("a100_sxm", "a100-sxm-80gb"), ("gh200", "gh200-96gb")):
        for length, dim in product((1024, 2048, 3072), (2048, 4096, 6144)):
            row = {"gpu": name, "op": "linear1", "b": 4, "l": length, "dim": dim, "mp": 1}
            sides = [(4 * length, 3 * dim, dim), (4 * length, dim, 3 * dim), (3 * dim, dim, 4 * length)]
            us = gemm.predict_us(gpu, Products.of(pd.DataFrame(sides, columns=["m", "n", "k"])), **GEMM)
            parts.append({**row, "fwd_us": us[0], "bwd_us": us[1] + us[2]})
    return pd.DataFrame(parts)


def _attention() -> pd.DataFrame:
    parts = []
    for source in attention.SOURCES:
        for head_dim in source.head_dims:
            rows = [(b, s, h) for b in (1, 4, 16) for s in (128, 512, 1024, 2048, 8192) for h in (1, 8, 32)]
            table = pd.DataFrame(rows, columns=["b", "s", "h"]).assign(hkv=lambda t: t.h, d=head_dim, causal=True)
            us = attention.predict_us(source.gpu, Heads.of(table), **ATTENTION)
            parts.append(table.assign(gpu=source.file_gpu, src="test", kernel="vllm_test", us=us))
    return pd.concat(parts)


def _charts() -> pd.DataFrame:
    parts = []
    for chart in attention.CHARTS:
        directions = ("fwd", "fwdbwd") if chart.profile == "h100-sxm" else ("fwdbwd",)
        own = {**MATH, "fixed_us": 40.0, "tail_share": 0.0} if chart.generation == "math" else {**ATTENTION, **CHART}
        form = attention.form_of(chart.gpu, own)
        for direction, head_dim, causal in product(directions, chart.costs, (0, 1)):
            lengths = pd.Series([512, 1024, 2048, 4096, 8192, 16_384])
            heads = attention.CHART_CHANNELS // head_dim
            table = pd.DataFrame({"b": attention.CHART_TOKENS / lengths, "s": lengths, "h": heads, "hkv": heads})
            work = Heads.of(table.assign(d=head_dim, causal=causal == 1))
            times = 1.0 if direction == "fwd" else 3.5
            rate = work.flops * times / attention.chart_us(form, work, direction) / 1e6
            columns = {"gpu": chart.file_gpu, "impl": chart.implementation, "dir": direction, "head_dim": head_dim}
            parts.append(pd.DataFrame({"seqlen": lengths, "tflops": rate}).assign(causal=causal, **columns))
    return pd.concat(parts)


def _attention_simumax() -> pd.DataFrame:
    """Heads of 128 entries, and of 192 in queries and keys, 128 in values, at `WIDE_SHARE` of their rate."""
    parts = []
    for name, gpu in (("a100_pcie", "a100-pcie-80gb"), ("b200_sxm", "b200-sxm-180gb")):
        for direction, h, dqk in product(("fwd", "bwd"), (32, 64), (128, 192)):
            row = {"b": 1, "s": 4096, "h": h, "hkv": h, "d": (dqk + 128) / 2, "causal": True}
            work = Heads.of(pd.DataFrame([row]))
            backward = direction == "bwd"
            rate = CHART["efficiency"] * (1 if dqk == 128 else WIDE_SHARE)
            form = attention.form_of(gpu, {**ATTENTION, "efficiency": rate, "bandwidth_efficiency": 1.0})
            ns = float(attention_ns(form, work, backward)[0])
            eff = 2 * float(work.flops[0]) * (2.5 if backward else 1.0) / ns / 1e3 / 312.0
            wide = {"gpu": name, "dir": direction, "dqk": dqk, "dv": 128, "contiguous": True, "eff_full": eff}
            parts.append({**{k: v for k, v in row.items() if k not in ("d", "causal")}, **wide, "peak_tflops": 312.0})
    return pd.DataFrame(parts)


def _flash() -> pd.DataFrame:
    return pd.DataFrame([{"gpu": "a100_sxm", "op": "flash_atten", "fwd_us": 100.0, "bwd_us": 300.0}])


def _memory() -> pd.DataFrame:
    parts = []
    shape = {"b": 4, "mp": 1, "h": 16}
    for _, name, gpu in memory.CARDS:
        for op_name in {op.name for op in memory.OPS.values()}:
            rows = [
                {**shape, "gpu": name, "op": op_name, "l": length, "dim": d}
                for length in (512, 1024, 4096)
                for d in (1024, 4096)
            ]
            table = pd.DataFrame(rows)
            for op in memory.OPS.values():
                if op.name == op_name:
                    size = np.asarray(2.0 * op.passes * op.elements(table), float)
                    table[op.column] = memory.predict_us(gpu, size, ETA, FIXED_US)
            parts.append(table)
    return pd.concat(parts)


def _optimizer() -> pd.DataFrame:
    rows = [(dim, n) for dim in (2048, 4096, 8192) for n in (2, 4, 8)]
    table = pd.DataFrame(rows, columns=["dim", "encoders"]).assign(gpu="a100_sxm", op="middleStage_optimizer", mp=1)
    return table.assign(dur=12 * table.dim**2 * table.encoders * PICOSECONDS_PER_PARAMETER / 1e6)


def _elementwise() -> pd.DataFrame:
    parts = []
    for (name, gpu), op in product((("a100", "a100-sxm-80gb"), ("h100", "h100-sxm-80gb")), memory.VIDUR):
        size = np.array([2.0**i for i in range(20, 30)])
        us = memory.predict_us(gpu, size, ETA, FIXED_US)
        parts.append(pd.DataFrame({"gpu": name, "op": op, "bytes": size, "us": us}))
    return pd.concat(parts)


def _nccl() -> pd.DataFrame:
    rows = []
    for profile, op, ranks, power in product(collectives.CARDS, collectives.KINDS, (2, 4, 8), range(9, 30)):
        wire = np.array([wire_bytes(collectives.KINDS[op], 2.0**power, ranks)])
        us = collectives.predict_us(wire, LOW[0], LOW[1], HIGH[0], HIGH[1])[0]
        gpu = collectives.CARDS[profile][0]
        rows.append({"gpu": gpu, "nccl": "1", "op": op, "n": ranks, "bytes": 2**power, "us": us})
    return pd.DataFrame(rows)


def _small() -> pd.DataFrame:
    rows = []
    for (system, _), power in product(collectives.SENDS.values(), range(18, 27)):
        us = SEND[0] + 2**power / SEND[1] / 1e3
        rows.append({"system": system, "op": "send_recv", "n": 2, "dev_per_node": 2, "bytes": 2**power, "us": us})
    return pd.DataFrame(rows)


def _copies() -> pd.DataFrame:
    rows = []
    systems = ("TIGER (PCIe3 GPU, P100 class)", "A100-PCIE-40GB", "nvbandwidth tutorial example", "GH200 480GB/96GB")
    for system, direction, size in product(systems, ("H2D", "D2H"), (1e6, 1e7, 1e8, 1e9)):
        gbps = size / 1e3 / (COPY[0] + size / COPY[1] / 1e3)
        rows.append({"system": system, "direction": direction, "mode": "pinned", "bytes": size, "gbps": gbps})
    return pd.DataFrame(rows)


def _maximum() -> pd.DataFrame:
    names = [*dict.fromkeys(gemm.MAXIMUM_RATES.values()), "MI300X"]
    rates = {"dtype": "bf16", "max_achievable_tflops": 600.0, "spec_tflops": 1000.0}
    return pd.DataFrame([{"gpu": name, **rates} for name in names])
