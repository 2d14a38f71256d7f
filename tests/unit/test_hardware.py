import csv
import os
from pathlib import Path

import pytest

from sim.hardware import UnknownGpu, find_gpu, gpu_aliases, gpu_names, make_cluster

DATASHEET_NAMES = {
    "V100-SXM2-32": "v100-sxm-32gb",
    "V100-PCIe": "v100-pcie-32gb",
    "A100-SXM-40": "a100-sxm-40gb",
    "A100-SXM-80": "a100-sxm-80gb",
    "A100-PCIe-40": "a100-pcie-40gb",
    "A100-PCIe-80": "a100-pcie-80gb",
    "H100-SXM": "h100-sxm-80gb",
    "H100-PCIe": "h100-pcie-80gb",
    "H100-96GB-HBM2e": "h100-96gb-hbm2e",
    "H100-NVL": "h100-nvl-94gb",
    "H200-SXM": "h200-sxm-141gb",
    "B200-SXM": "b200-sxm-180gb",
    "GB200 (per GPU)": "gb200-186gb",
    "GH200-96": "gh200-96gb",
    "GH200-144": "gh200-144gb",
    "L40S": "l40s-48gb",
    "A10G": "a10g-24gb",
    "RTX3090": "rtx3090-24gb",
    "RTX4090": "rtx4090-24gb",
    "RTX5090": "rtx5090-32gb",
    "MI250X": "mi250x-gcd-64gb",
    "MI300X": "mi300x-192gb",
}


def shared_folder() -> Path:
    """Material beside the repository; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("SIM_SHARED", Path(__file__).parents[2].parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared material at {folder}")
    return folder


def test_every_card_of_the_datasheet_table_is_in_the_catalogue_with_its_figures():
    with (shared_folder() / "data/kernels/datasheet.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["gpu"] for row in rows} == set(DATASHEET_NAMES)
    for row in rows:
        gpu = find_gpu(DATASHEET_NAMES[row["gpu"]])
        devices = 2 if row["gpu"] == "MI250X" else 1
        sixteen_bit = gpu.peak_flops_per_s("fp16")
        assert sixteen_bit * devices == round(float(row["bf16_dense_tflops"]) * 1e12)
        assert gpu.peak_flops_per_s("fp32") * devices == round(float(row["fp32_tflops"]) * 1e12)
        if row["fp8_dense_tflops"]:
            assert gpu.peak_flops_per_s("fp8") == round(float(row["fp8_dense_tflops"]) * 1e12)
        assert gpu.memory_bytes * devices == int(row["mem_gb"]) * 2**30
        assert gpu.memory_bandwidth_bytes_per_s * devices == int(row["mem_bw_gbps"]) * 10**9
        assert gpu.l2_bytes * devices == int(row["l2_mb"]) * 10**6
        assert gpu.sms * devices == int(row["sms"])
        if devices == 1:
            assert gpu.gpu_link_bytes_per_s * 2 == round(float(row["gpu_link_total_gbps"]) * 1e9)


def test_an_h100_is_found_by_any_of_its_names():
    h100 = find_gpu("h100-sxm-80gb")
    assert find_gpu("h100-sxm") is h100
    assert find_gpu("H100_SXM") is h100
    assert find_gpu("h100") is h100
    assert find_gpu("h100-96gb-hbm2e") is not h100
    assert find_gpu("a100-sxm-80gb").peak_flops_per_s("bf16") == 312 * 10**12


def test_an_unknown_gpu_is_an_error():
    with pytest.raises(UnknownGpu):
        find_gpu("h900")


@pytest.mark.parametrize("name", gpu_names())
def test_every_figure_has_a_source_and_fits_its_relatives(name):
    gpu = find_gpu(name)
    assert gpu.name == name and gpu_aliases()[name] == name
    assert gpu.usable_memory_bytes <= gpu.memory_bytes
    assert gpu.usable_memory_bytes > 0.9 * gpu.memory_bytes
    assert gpu.node.network_bytes_per_s > 0
    for figure, source in gpu.sources:
        assert source.label in ("datasheet", "published", "assumed"), figure
        assert source.text
    assert gpu.source("context_bytes").label == "assumed"
    assert gpu.source("network_bytes_per_s").label == "assumed"


def test_an_h100_shows_79_gib_and_shares_eight_400_gigabit_adapters():
    h100 = find_gpu("h100")
    assert h100.usable_memory_bytes == round(79.11 * 2**30)
    assert h100.source("usable_memory_bytes").label == "published"
    assert h100.context_bytes == 2**29
    assert h100.node.network_bytes_per_s == 50 * 10**9


def test_a_cluster_takes_the_catalogues_figures_unless_given():
    h100 = find_gpu("h100")
    plain = make_cluster(h100, nodes=2)
    assert (plain.gpus, plain.gpus_per_node) == (16, 8)
    assert plain.usable_memory_bytes == h100.usable_memory_bytes
    assert plain.source("usable_memory_bytes").label == "published"
    given = make_cluster(h100, gpus_per_node=4, usable_memory_bytes=2**30, network_bytes_per_s=1)
    assert (given.gpus, given.usable_memory_bytes, given.network_bytes_per_s) == (4, 2**30, 1)
    assert given.source("usable_memory_bytes").label == "given"
    assert given.source("sms").label == "datasheet"


def test_a_v100_has_no_bf16_rate():
    with pytest.raises(KeyError):
        find_gpu("v100").peak_flops_per_s("bf16")
