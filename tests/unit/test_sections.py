"""What overlaps inside a tensor-parallel group is played as passages, and takes the time that it takes as meetings."""

from __future__ import annotations

import numpy as np
import pytest

from sim.api import cost_model
from sim.engine.play import play
from sim.program.passage import Passage
from sim.program.program import COMPUTE, TENSOR
from sim.program.world import MEET, PASSAGE
from sim.runtime import lower as lowering
from sim.runtime.lower import lower
from sim.runtime.record import record
from sim.runtime.sections import COLLECTIVE, LAUNCH, RECORD, WAIT, Piece, SectionRow, pieces
from sim.scenario import load_text
from sim.scenario.setup import Setup
from sim.timeline.lanes import make_lanes

TEXT = """
model: {preset: gpt-tiny, implementation: megatron, hidden: HIDDEN, heads: 8, layers: 8, dropout: 0.1}
cluster: {gpu: a100, gpus_per_node: 2, nodes: NODES, network: 10 Gb/s}
batch: {micro_batch: 2, seq_len: 256, accumulation: 6}
precision: {parameters: bf16, compute: bf16}
parallel: {tensor: {degree: 2, sequence_parallel: SEQUENCE}, pipeline: {degree: 4, schedule: SCHEDULE}}
"""


def setup_of(text: str) -> Setup:
    return load_text(text, "test").strategies[0]


def text_of(hidden: int = 512, sequence: str = "true", schedule: str = "1f1b") -> str:
    text = TEXT.replace("HIDDEN", str(hidden)).replace("SEQUENCE", sequence).replace("NODES", "4")
    return text.replace("SCHEDULE", schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("sequence", ["false", "true"])
@pytest.mark.parametrize("hidden", [128, 4096])  # bound by the host, bound by the GPU
def test_passages_take_the_time_of_meetings(
    hidden: int, sequence: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(text_of(hidden, sequence, schedule))
    programs = [record(setup, 2, rank=rank) for rank in range(4)]
    lanes = []
    for passages in (True, False):
        if not passages:
            monkeypatch.setattr(lowering._Lowering, "_tensor_link_is_private", lambda self: False)
        lowered = lower(programs, cost_model(setup), setup.mesh)
        kinds = np.concatenate([rank.kind for rank in lowered.world.ranks])
        assert bool((kinds == PASSAGE).any()) == passages
        assert (kinds == MEET).any()
        played = play(lowered.world)
        lanes.append(
            [make_lanes(p, lowered.world, played, e, n) for n, (p, e) in enumerate(zip(programs, lowered.entries))]
        )
    for ours, theirs in zip(*lanes):
        seen = ours.runs
        if hidden == 128:  # else a full queue holds the host up, in larger steps where rows are longer
            np.testing.assert_allclose(ours.issue_ns, theirs.issue_ns, atol=100)
        np.testing.assert_allclose(ours.start_ns[seen], theirs.start_ns[seen], atol=100)  # transfers in whole ns
        np.testing.assert_allclose(ours.end_ns[seen], theirs.end_ns[seen], atol=100)


def test_a_link_shared_with_the_pipeline_makes_no_passages() -> None:
    text = text_of().replace("gpus_per_node: 2, nodes: 4", "gpus_per_node: 8, nodes: 1")
    setup = setup_of(text)
    lowered = lower([record(setup, 1, rank=rank) for rank in range(4)], cost_model(setup), setup.mesh)
    assert not any((rank.kind == PASSAGE).any() for rank in lowered.world.ranks)


def row(kind: int, stream: int = COMPUTE, argument: int = 0, waits: int = 0) -> SectionRow:
    return SectionRow(kind, stream, argument, waits)


def started(event: int) -> list[SectionRow]:
    return [
        row(RECORD, COMPUTE, event, 1), row(WAIT, TENSOR, event), row(COLLECTIVE, TENSOR), row(RECORD, TENSOR, event + 1, 1)
    ]  # fmt: skip


def test_launches_and_what_overlaps_are_one_piece() -> None:
    rows = [row(LAUNCH), *started(0), row(LAUNCH), row(WAIT, COMPUTE, 1), row(LAUNCH)]
    assert pieces(rows, 1024) == [Piece("passage", 0, 8)]
    assert pieces([row(LAUNCH)] * 3, 1024) == [Piece("burst", 0, 3)]
    assert pieces([row(LAUNCH)] * 3, 8) == [Piece("burst", 0, 2), Piece("burst", 2, 3)]


def test_what_nobody_waits_for_here_stays_single_rows() -> None:
    rows = [row(LAUNCH), *started(0), row(LAUNCH)]
    assert pieces(rows, 1024) == [
        Piece("burst", 0, 1), *(Piece("rows", at, at + 1) for at in range(1, 5)), Piece("burst", 5, 6)
    ]  # fmt: skip


def test_an_event_that_others_wait_for_too_stays_a_row() -> None:
    rows = [row(RECORD, COMPUTE, 0, 2), *started(0)[1:], row(WAIT, COMPUTE, 1)]
    assert all(piece.form == "rows" for piece in pieces(rows, 1024))


def test_what_is_no_passage_is_said() -> None:
    def passage(beside: list[int], after: list[int], work: list[int], raises: list[int]) -> list[str]:
        duration_ns = np.array([work, [2 * ns for ns in work]])
        made = Passage(
            np.ones(len(work), np.int64), duration_ns, np.array(beside, bool), np.array(after), np.array(raises)
        )
        return list(made.problems())

    assert passage([0, 0], [-1, -1], [5, 5], [0, 1]) == ["entry 1: a kernel lifts the level"]
    assert passage([0, 1, 0], [-1, 0, 1], [5, 0, 5], [0, 0, 0]) == ["entry 2: waits and works"]
    assert passage([0, 1, 1, 0], [-1, 0, -1, -1], [5, 0, 7, 5], [0, 0, 1, 0]) == [
        "entry 2: a transfer's time depends on the level", "ends before what runs beside"
    ]  # fmt: skip
    assert passage([0, 1, 0], [-1, -1, 1], [5, 0, 0], [0, 0, 0]) == [
        "entry 1: begins beside the main stream without a wait"
    ]
    assert passage([1], [-1], [0], [0])[-1] == "begins or ends beside the main stream"
