from __future__ import annotations

from typing import get_args

import numpy as np
import pandas as pd
import pytest

from sim.cost.collective import CollectiveForm
from sim.cost.figures import CostError
from sim.cost.profile import load_profile
from sim.program.kernels import Collective, CollectiveKind
from tests.unit.cost_fixtures import A100, H100, FakeGpu, Group, measured

FORM = CollectiveForm.of(load_profile("h100-sxm").figures, H100)
FIGURES = load_profile("h100-sxm").figures
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


def collective(kind: CollectiveKind, size_bytes: int, ranks: int) -> Collective:
    return Collective(kind, size_bytes, "fsdp", ranks)


def protocol(kind: str, name: str, ranks: int = 8) -> tuple[float, float]:
    """Latency in ns and bandwidth in bytes/ns of the H100 profile."""
    root = f"collective.{kind}.n{ranks}.{name}"
    return FIGURES[f"{root}_us"] * 1e3, FIGURES[f"{root}_gb_per_s"]


def test_a_small_all_gather_takes_the_low_latency_protocol() -> None:
    latency_ns, bandwidth = protocol("all_gather", "low_latency")
    cost = FORM.cost(collective("all_gather", 1 << 19, 8), Group(8))
    assert cost.latency_ns == round(latency_ns)
    assert cost.bytes == (1 << 19) * 7 // 8
    assert cost.alone_ns == pytest.approx(latency_ns + (1 << 19) * 7 / 8 / bandwidth, rel=1e-12)
    assert dict(cost.parts)["protocol"] == "low_latency"


def test_a_large_all_gather_takes_the_bandwidth_protocol() -> None:
    latency_ns, bandwidth = protocol("all_gather", "bandwidth")
    cost = FORM.cost(collective("all_gather", 1 << 30, 8), Group(8))
    assert (cost.latency_ns, cost.cap_bytes_per_s) == (round(latency_ns), bandwidth * 1e9)
    assert cost.alone_ns == pytest.approx(latency_ns + (1 << 30) * 7 / 8 / bandwidth, rel=1e-12)
    assert dict(cost.parts)["protocol"] == "bandwidth"


def test_the_faster_protocol_is_chosen_at_every_size() -> None:
    lines = [protocol("reduce_scatter", name) for name in ("low_latency", "bandwidth")]
    for size_bytes in (512 << i for i in range(21)):
        wire = size_bytes * 7 / 8
        by_hand = min(latency_ns + wire / bandwidth for latency_ns, bandwidth in lines)
        assert FORM.cost(collective("reduce_scatter", size_bytes, 8), Group(8)).alone_ns == pytest.approx(by_hand)


def test_an_all_reduce_in_the_switch_asks_no_more_than_the_link_carries() -> None:
    # NVLS: a bus bandwidth above the link's 450 GB/s; the time is that of the bus bandwidth.
    latency_ns, bandwidth = protocol("all_reduce", "bandwidth")
    assert bandwidth > 450
    cost = FORM.cost(collective("all_reduce", 1 << 30, 8), Group(8))
    assert cost.cap_bytes_per_s == pytest.approx(450e9)
    assert cost.alone_ns == pytest.approx(latency_ns + 2 * (1 << 30) * 7 / 8 / bandwidth, rel=1e-6)


def test_one_rank_has_nothing_to_exchange() -> None:
    assert FORM.cost(collective("all_reduce", 1 << 20, 1), Group(1)).alone_ns == 0


def test_an_odd_number_of_ranks_takes_the_figures_of_the_next_larger() -> None:
    three, four = (FORM.cost(collective("all_gather", 1 << 30, n), Group(n)) for n in (3, 4))
    assert three.cap_bytes_per_s == four.cap_bytes_per_s
    assert three.bytes == round((1 << 30) * 2 / 3)


def test_a_group_across_nodes_is_as_fast_as_the_slower_of_nvlink_and_nic() -> None:
    # 8 x 8 H100: NVLink asks S 7/8 over its bandwidth, a NIC S/8 7/8 / 47: NVLink is slower; 7 hops of 23 us between nodes
    # besides, and 7 x 7 of 3.4 us in the other nodes.
    hops_ns = 7 * 23_000 + 49 * 3_400
    size_bytes = 1 << 30
    latency_ns, bandwidth = protocol("all_gather", "bandwidth")
    cost = FORM.cost(collective("all_gather", size_bytes, 64), Group(64, nodes=8))
    assert dict(cost.parts)["bound"] == "node"
    assert cost.bytes == size_bytes // 8 * 7 // 8
    assert (dict(cost.parts)["hops"], dict(cost.parts)["node_hops"]) == (7, 49)
    assert cost.alone_ns == pytest.approx(latency_ns + hops_ns + size_bytes * 7 / 8 / bandwidth, rel=1e-6)
    slow = CollectiveForm.of(FIGURES, H100, network_bytes_per_s=25e9)
    halved = slow.cost(collective("all_gather", size_bytes, 64), Group(64, nodes=8))
    assert dict(halved.parts)["bound"] == "nic"
    assert halved.alone_ns == pytest.approx(latency_ns + hops_ns + size_bytes / 8 * 7 / 8 / 23.5, rel=1e-6)


def test_a_tree_passes_no_ring_inside_nodes() -> None:
    cost = FORM.cost(collective("all_reduce", 4096, 64), Group(64, nodes=8))
    assert dict(cost.parts) | {"node_ns": 0, "nic_ns": 0} == {
        "protocol": "low_latency", "hops": 6, "node_hops": 0, "node_ns": 0, "nic_ns": 0, "bound": dict(cost.parts)["bound"],
    }  # fmt: skip


def test_single_gpu_nodes_exchange_over_their_nics_only() -> None:
    cost = FORM.cost(collective("all_reduce", 1 << 30, 4), Group(4, nodes=4))
    assert dict(cost.parts)["node_ns"] == 0
    assert cost.alone_ns == pytest.approx(6 * 23_000 + 2 * (1 << 30) * 3 / 4 / 47, rel=1e-6)


def test_a_published_all_reduce_of_two_nodes_comes_within_fifteen_per_cent() -> None:
    """2 x 8 H100 with eight 200 Gb/s NICs per node, 8 GiB and 1 GiB: 47.5 and 6.76 ms (COSTS.md 5, GCP a3-mega)."""
    form = CollectiveForm.of(load_profile("h100-sxm").figures, H100, network_bytes_per_s=25e9)
    for size_bytes, published_ns in ((8 << 30, 47.535e6), (1 << 30, 6.759e6)):
        predicted = form.cost(collective("all_reduce", size_bytes, 16), Group(16, nodes=2)).alone_ns
        print(f"2 x 8 H100 all-reduce of {size_bytes >> 30} GiB: {predicted / published_ns - 1:+.1%}")
        assert abs(predicted / published_ns - 1) < 0.15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [Group(2), Group(8), Group(16, 2), Group(64, 8), Group(4, 4)])
def test_more_bytes_never_take_less_time(kind: CollectiveKind, group: Group) -> None:
    times = [FORM.cost(collective(kind, 1 << i, group.size), group).alone_ns for i in range(8, 36)]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_crossing_nodes_never_makes_a_collective_faster(kind: CollectiveKind) -> None:
    for i in range(8, 36):
        one, two = (FORM.cost(collective(kind, 1 << i, 8), Group(8, nodes)).alone_ns for nodes in (1, 4))
        assert two > one


def test_a_placement_of_another_size_is_refused() -> None:
    with pytest.raises(CostError, match="16 ranks of fsdp on a placement of 8"):
        FORM.cost(collective("all_gather", 1 << 20, 16), Group(8))


def test_a_send_is_a_flow_over_nvlink_or_a_nic() -> None:
    near, far = FORM.send(1 << 26, same_node=True), FORM.send(1 << 26, same_node=False)
    assert (near.cap_bytes_per_s, far.cap_bytes_per_s) == (FIGURES["p2p.node_gb_per_s"] * 1e9, pytest.approx(34e9))
    assert (near.latency_ns, far.latency_ns) == (round(FIGURES["p2p.node_latency_us"] * 1e3), 23_000)


@pytest.mark.parametrize(
    ("profile", "gpu", "file_gpu", "at_most"),
    [("h100-sxm", H100, "h100_sxm", 0.05), ("a100-sxm-80", A100, "a100_sxm", 0.06)],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_inside_a_node_meet_the_measured_medians(
    profile: str, gpu: FakeGpu, file_gpu: str, at_most: float, ranks: int
) -> None:
    form = CollectiveForm.of(load_profile(profile).figures, gpu)
    rows = pd.read_csv(measured("nccl_aic.csv")).query(f"gpu == '{file_gpu}' and n == {ranks}")
    rows = rows.groupby(["op", "bytes"]).us.median().reset_index()
    rows = rows[rows.op.isin(["all_gather", "reduce_scatter", "all_reduce"])]
    predicted = np.array(
        [form.cost(collective(r.op, r.bytes, ranks), Group(ranks)).alone_ns for r in rows.itertuples()]
    )
    errors = np.abs(predicted / (rows.us.to_numpy() * 1e3) - 1)
    print(f"{file_gpu}, {ranks} ranks: median {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}")
    assert len(rows) == 63
    assert np.median(errors) < at_most
