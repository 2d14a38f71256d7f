"""What is proposed against a peak: a measure that a scenario can play, or honest words."""

from __future__ import annotations

from typing import Literal

import pytest

from sim.api import simulate
from sim.program.program import Owner
from sim.report.levers import FIELDS, find_lever, measure_against, with_field
from sim.scenario import is_field, load_text
from sim.scenario.setup import Setup
from tests.unit.scenarios import TINY


def setup(*overrides: str) -> Setup:
    return load_text(TINY, overrides=overrides).strategies[0]


@pytest.mark.parametrize(
    ("overrides", "measure"),
    [
        (("parallel.fsdp.reshard_after_forward=false",), "resharding blocks (parallel.fsdp.reshard_after_forward: true)"),
        (("parallel.fsdp.forward_prefetch=2",), "prefetching fewer blocks (parallel.fsdp.forward_prefetch, "
         "backward_prefetch)"),
        (("parallel.fsdp.reshard_after_forward=true",), None),
        ((), None),
    ],
)  # fmt: skip
def test_gathered_parameters_have_measures_of_their_own(overrides: tuple[str, ...], measure: str | None) -> None:
    assert measure_against(Owner.GATHERED, setup(*overrides)) == measure


def test_a_chunked_loss_is_proposed_as_far_as_a_scenario_can_play_it() -> None:
    one_gpu = ("parallel=null", "cluster.gpus_per_node=1")
    assert measure_against(Owner.LOSS, setup()) == (
        "a chunked loss (model.loss_chunks, model.loss_chunking: projection)"
    )
    assert measure_against(Owner.LOSS, setup(*one_gpu)) == "a chunked loss (model.loss_chunks)"
    chunked = setup(*one_gpu, "model.loss_chunks=4")
    assert measure_against(Owner.LOSS, chunked) == "more chunks of the loss (model.loss_chunks)"


@pytest.mark.parametrize("owner", [Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER])
def test_states_are_sharded(owner: Owner) -> None:
    assert measure_against(owner, setup()) == "sharding over more GPUs (parallel.fsdp.degree)"
    alone = setup("parallel=null", "cluster.gpus_per_node=1")
    assert measure_against(owner, alone) == "sharding (parallel.fsdp)"


def test_states_that_are_most_of_the_peak_are_the_lever() -> None:
    (outcome, _) = simulate(load_text(TINY, overrides=["batch.seq_len=16", "batch.micro_batch=1"])).outcomes
    lever = find_lever(outcome)
    assert lever is not None
    assert lever.measure == "sharding over more GPUs (parallel.fsdp.degree)"
    assert lever.owner == ", ".join(o.label for o in (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER))
    state = sum(outcome.owners.get(owner, 0) for owner in (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER))
    assert lever.peak_bytes >= outcome.peak.bytes - state
    assert lever.peak_bytes < outcome.peak.bytes / 2


@pytest.mark.parametrize("there", [True, False])
def test_a_measure_without_a_field_says_so(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Literal["batch.seq_len", "batch.nothing"] = "batch.seq_len" if there else "batch.nothing"
    monkeypatch.setitem(FIELDS, "offloading checkpoints", path)
    words = "(batch.seq_len)" if there else "(which no scenario can play yet)"
    assert with_field("offloading checkpoints") == f"offloading checkpoints {words}"
    assert with_field("checkpointing layers") == "checkpointing layers"


def test_fields_are_found_by_their_path() -> None:
    assert all(is_field(path) for path in ("model", "model.preset", "parallel.fsdp.degree", "optimizer.variant"))
    assert not any(is_field(path) for path in ("modl", "model.preset.name", "parallel.fsdp.degre", ""))
