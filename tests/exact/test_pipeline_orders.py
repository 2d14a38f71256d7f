"""Orders of pipeline actions equal those of torch.distributed.pipelining's own generators.

recordings/pipeline_orders.json holds them without idle steps; for 8 ranks their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sim.runtime.schedules import SCHEDULES, Kind, Step, in_flight, orders, parts_of, with_transfers

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recordings" / "pipeline_orders.json").read_text(encoding="utf-8")
)


def name_of(case: dict[str, Any]) -> str:
    return f"{case['schedule']} p{case['ranks']} m{case['micro_batches']} v{case['chunks']}"


def orders_of(case: dict[str, Any]) -> list[str]:
    made = orders(case["schedule"], case["ranks"], case["micro_batches"], case["chunks"])
    return [" ".join(map(str, order)) for order in made]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_actions_come_in_torchs_order(case: dict[str, Any]) -> None:
    if "orders" in case:
        assert orders_of(case) == case["orders"]
    else:
        assert hashlib.sha256("\n".join(orders_of(case)).encode()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("case", [case for case in CASES if case["in_flight"]], ids=name_of)
def test_as_many_micro_batches_are_in_flight(case: dict[str, Any]) -> None:
    made = orders(case["schedule"], case["ranks"], case["micro_batches"], case["chunks"])
    assert [[in_flight(order), in_flight(order, until_weights=True)] for order in made] == case["in_flight"]


@pytest.mark.parametrize("case", [case for case in CASES if "with_transfers" in case], ids=name_of)
def test_transfers_stand_where_torch_posts_them(case: dict[str, Any]) -> None:
    made = orders(case["schedule"], case["ranks"], case["micro_batches"])
    steps = with_transfers(made, parts_of(case["ranks"], 1), early=False)
    assert [" ".join(map(_text, rank)) for rank in steps] == case["with_transfers"]


def _text(step: Step) -> str:
    kind = "" if step.computes else "SEND_" if step.sends is not None else "RECV_"
    return f"{kind}{step.action.kind.value}{step.action.micro_batch}"


@pytest.mark.parametrize("p", [2, 4, 8])
def test_in_flight_counts_follow_their_formulas(p: int) -> None:
    for m in (p, 2 * p, 4 * p):
        for r, order in enumerate(orders("1f1b", p, m)):
            assert in_flight(order) == min(m, p - r)
        assert {in_flight(order) for order in orders("gpipe", p, m)} == {m}
        for v in (1, 2, 3):
            for r, order in enumerate(orders("interleaved", p, m, v)):
                assert in_flight(order) == min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 1)
            assert {in_flight(order) for order in orders("breadth-first", p, m, v)} == {v * m}
        for r, order in enumerate(orders("zb-h1", p, m)):
            assert (in_flight(order), in_flight(order, until_weights=True)) == (p - r, p)


def test_zb_h2_as_its_paper_writes_it() -> None:
    """Qi et al. 2024, figure 3: 4 ranks, 8 micro-batches; the first rank has 2 p - 1 forwards before its first backward, and
    2 p - 1 micro-batches are the most that any rank holds."""
    made = orders("zb-h2", 4, 8)
    assert " ".join(map(str, made[0])) == (
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7"
    )
    assert " ".join(map(str, made[3])) == (
        "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1 3W2 3W3 3W4 3W5 3W6 3W7"
    )
    for p in (2, 4, 8):
        for m in (2 * p, 3 * p + 1, 8 * p):
            most = [in_flight(order, until_weights=True) for order in orders("zb-h2", p, m)]
            assert most == [2 * p - 1] * p


def test_deepspeeds_first_stage_holds_four_of_eight() -> None:
    """deepspeedai/DeepSpeed#2800: 4 stages, 8 micro-batches; the old code allowed 5."""
    assert in_flight(orders("1f1b", 4, 8)[0]) == 4


@pytest.mark.parametrize(("p", "v", "rank"), [(4, 2, 0), (4, 2, 3), (8, 3, 2)])
def test_megatrons_warm_up(p: int, v: int, rank: int) -> None:
    """NVIDIA/Megatron-LM#169: (p - rank - 1) * 2 + (v - 1) * p forwards before the first backward follows one."""
    order = orders("interleaved", p, 4 * p, v)[rank]
    first = next(i for i, action in enumerate(order) if action.kind is Kind.BACKWARD)
    assert first - 1 == (p - rank - 1) * 2 + (v - 1) * p


def test_orders_that_wait_for_each_other_are_refused() -> None:
    crossed = orders("1f1b", 2, 2)
    crossed[1].reverse()
    with pytest.raises(ValueError, match="wait for each other: rank 0 at 0B0, rank 1 at 1B1"):
        with_transfers(crossed, parts_of(2, 1), early=True)


def test_every_schedule_has_cases() -> None:
    """But ZB-H2, which torch has not."""
    assert {case["schedule"] for case in CASES} == set(SCHEDULES) - {"zb-h2"}


@pytest.mark.parametrize(
    ("schedule", "v"),
    [("interleaved", 2), ("interleaved", 3), ("breadth-first", 2), ("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)],
)  # fmt: skip
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_early_transfers_are_those_that_torch_adds(schedule: str, v: int, p: int) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    parts = parts_of(p, v, folded=schedule in ("zb-v", "dualpipe-v"))
    for m in (2 * p, 4 * p):
        made = orders(schedule, p, m, v)
        theirs = {rank: [torch._Action.from_str(str(action)) for action in order] for rank, order in enumerate(made)}
        steps = torch._add_send_recv(theirs, lambda stage: parts[stage].rank, len(parts))
        for rank, mine in enumerate(with_transfers(made, parts, early=True)):
            assert [_torchs_text(step) for step in mine] == [str(action) for action in steps[rank]]


def _torchs_text(step: Step) -> str:
    """A received one is named after the stage that it is for."""
    stage, kind, micro_batch = step.action
    if step.computes:
        return str(step.action)
    if step.receives is not None:
        stage += 1 if kind is Kind.FORWARD else -1
    return f"{stage}{'SEND' if step.sends is not None else 'RECV'}_{kind.value}{micro_batch}"


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_in_slots_a_rank_receives_computes_and_sends(p: int, v: int) -> None:
    """forward_backward_pipelining_with_interleaving of Megatron 2022: in the steady state one of each with nothing between."""
    parts = parts_of(p, v)
    for m in (p, 2 * p, 5 * p):
        made = orders("interleaved", p, m, v)
        for rank, steps in enumerate(with_transfers(made, parts, early=False, slots=True)):
            assert [step.action for step in steps if step.computes] == made[rank]
            kinds = "".join("c" if step.computes else "s" if step.sends is not None else "r" for step in steps)
            ahead = min(m * v, (p - rank - 1) * 2 + (v - 1) * p)
            steady = m * v - ahead if m * v - ahead > 1 else 0
            assert kinds.count("c" if p == 1 else "cc") >= steady
            for at, step in enumerate(steps):
                if step.receives is not None:  # it needs it before it sends anything
                    rest = kinds[at:]
                    assert "s" not in rest[: rest.index("c")]


def test_slots_of_two_ranks_written_out() -> None:
    (first, second) = with_transfers(orders("interleaved", 2, 4, 1), parts_of(2, 1), early=False, slots=True)
    assert [_text(step) for step in second] == [
        "RECV_F0", "F0", "B0", "SEND_B0", "RECV_F1", "F1", "B1", "SEND_B1",
        "RECV_F2", "F2", "B2", "SEND_B2", "RECV_F3", "F3", "B3", "SEND_B3",
    ]  # fmt: skip
    assert [_text(step) for step in first[:7]] == ["F0", "SEND_F0", "F1", "SEND_F1", "RECV_B0", "F2", "B0"]
