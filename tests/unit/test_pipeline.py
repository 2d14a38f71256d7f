"""Pipeline ranks of language models: what they hold, move and wait for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from sim.api import cost_model, play_time, simulate_setup
from sim.engine.deadlock import DeadlockError
from sim.engine.memory import play_memory
from sim.program.kernels import Gemm, Transfer
from sim.program.program import (
    COMPUTE,
    RECEIVE_NEXT,
    RECEIVE_PREVIOUS,
    SEND_NEXT,
    SEND_PREVIOUS,
    Mem,
    Owner,
    Phase,
    Program,
    Row,
)
from sim.runtime.lower import LINKS_PER_RANK, NIC, lower
from sim.runtime.record import record
from sim.runtime.recorder import Recorder
from sim.scenario import load_text
from sim.scenario.setup import Setup

GPT = """
model: {{preset: gpt-tiny, implementation: {implementation}, layers: 8, tied_embeddings: {tied}}}
cluster: {{gpu: h100, gpus_per_node: {gpus}, nodes: {nodes}}}
batch: {{micro_batch: 2, seq_len: 128, accumulation: {micro_batches}}}
precision: {{parameters: bf16, compute: bf16}}
parallel: {{pipeline: {{degree: 4, {pipeline}}}{fsdp}}}
"""
HIDDEN_BYTES = 2 * 128 * 512 * 2


def setup_of(
    pipeline: str = "schedule: 1f1b", implementation: str = "nanogpt", micro_batches: int = 8, *, tied: bool = False,
    gpus: int = 4, nodes: int = 1, fsdp: str = "",
) -> Setup:  # fmt: skip
    text = GPT.format(
        pipeline=pipeline, implementation=implementation, micro_batches=micro_batches, tied=str(tied).lower(),
        gpus=gpus, nodes=nodes, fsdp=fsdp,
    )  # fmt: skip
    return load_text(text, "pipeline").strategies[0]


def programs_of(setup: Setup, steps: int = 2) -> list[Program]:
    return [record(setup, steps, rank=rank) for rank in range(setup.stages)]


def kernels_of(program: Program) -> Counter[object]:
    launched = program.row_argument[program.row_kind == Row.LAUNCH].tolist()
    return Counter(program.kernels[number] for number in launched)


def collectives_of(program: Program) -> Counter[tuple[str, str]]:
    issued = (program.collectives[i] for i in program.row_argument[program.row_kind == Row.COLLECTIVE].tolist())
    return Counter((collective.kind, collective.group) for collective in issued)


def test_a_stage_has_its_own_layers_and_the_ends_have_embedding_and_head() -> None:
    paths = [{path.split(".")[0] + "." + path.split(".")[1] for path in program.paths if path.count(".")}
             for program in programs_of(setup_of("placement: [1, 2, 2, 3]"))]  # fmt: skip
    assert paths == [
        {"layers.0"}, {"layers.1", "layers.2"}, {"layers.3", "layers.4"}, {"layers.5", "layers.6", "layers.7"},
    ]  # fmt: skip
    roots = [{path for path in program.paths if path and "." not in path} for program in programs_of(setup_of())]
    assert roots == [{"wte", "wpe"}, set(), set(), {"lnf", "head", "loss"}]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth-first"])
@pytest.mark.parametrize("implementation", ["nanogpt", "megatron"])
def test_all_stages_together_compute_what_one_gpu_computes(schedule: str, implementation: str) -> None:
    setup = setup_of(f"schedule: {schedule}", implementation, 4)
    alone = record(replace(setup, pipeline=None), 1)
    together = sum((kernels_of(program) for program in programs_of(setup, 1)), Counter())
    gemms = {kernel: n for kernel, n in kernels_of(alone).items() if isinstance(kernel.work, Gemm)}  # type: ignore[attr-defined]
    assert {kernel: n for kernel, n in together.items() if isinstance(kernel.work, Gemm)} == gemms  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("implementation", ["nanogpt", "megatron"])
def test_a_split_backward_computes_the_same(schedule: str, implementation: str) -> None:
    """Products, that is: none is computed in both passes."""
    split = setup_of(f"schedule: {schedule}", implementation)
    alone = kernels_of(record(replace(split, pipeline=None), 1))
    together = sum((kernels_of(program) for program in programs_of(split, 1)), Counter())
    for kernel, count in alone.items():
        if isinstance(kernel.work, Gemm):  # type: ignore[attr-defined]
            assert together[kernel] == count


def held_bytes(program: Program) -> dict[str, int]:
    """Bytes of tensors at every mark; of a split backward, after its first pass."""
    sign = np.where(program.mem_kind == Mem.ALLOC, 1, 0) * program.mem_bytes
    sizes = dict(zip(program.mem_handle[program.mem_kind == Mem.ALLOC].tolist(), sign[sign > 0].tolist()))
    freed = [
        sizes.get(handle, 0) if kind == Mem.FREE else 0
        for handle, kind in zip(program.mem_handle.tolist(), program.mem_kind.tolist())
    ]
    held = np.cumsum(sign - np.array(freed))
    return {mark.name: int(held[mark.memory_events - 1]) for mark in reversed(program.marks)}


def test_megatron_keeps_inputs_and_gradients_of_linear_layers_until_their_weights_turn() -> None:
    """zero-bubble's WeightGradStore: 7 h of inputs and 9 h of gradients of a token and layer, in 16 bit. Rank 2 of 4 does its
    first weights after its third first pass, and has one micro-batch in flight from the first on."""
    program = programs_of(setup_of("schedule: zb-h1", "megatron"), 1)[2]
    held = held_bytes(program)
    layers, tokens, element = 2, 2 * 128, 2  # of the output, which lets go of its bytes when it is sent
    assert held["s0.bwd2"] - held["s0.bwd1"] == layers * tokens * 512 * 2 * (7 + 9) + element


def test_torch_keeps_the_graph_until_its_weights_turn() -> None:
    program = programs_of(setup_of("schedule: zb-h1", "nanogpt"), 1)[2]
    held = held_bytes(program)
    assert held["s0.bwd2"] - held["s0.bwd1"] > 2 * 2 * 128 * 512 * 2 * (17 + 9)


def test_every_hidden_state_and_every_gradient_is_sent_once() -> None:
    setup = setup_of()
    for rank, program in enumerate(programs_of(setup, 1)):
        sent = [program.transfers[i] for i in program.row_argument[program.row_kind == Row.SEND].tolist()]
        assert {transfer.bytes for transfer in sent} <= {HIDDEN_BYTES}
        assert [t.micro_batch for t in sent if not t.backward] == ([*range(8)] if rank < 3 else [])
        assert [t.micro_batch for t in sent if t.backward] == ([*range(8)] if rank > 0 else [])


def test_a_v_hands_on_at_its_turn_without_a_transfer() -> None:
    program = programs_of(setup_of("schedule: zb-v"), 1)[3]
    assert {transfer.stage for transfer in program.transfers} == {2, 3, 4, 5}
    assert not [t for t in program.transfers if t.stage == 3 and not t.backward]


@pytest.mark.parametrize(("implementation", "made"), [("nanogpt", 8), ("megatron", 2 * 8)])
def test_buffers_are_made_per_micro_batch_once_or_at_every_receive(implementation: str, made: int) -> None:
    """torch's PipelineStage keeps them for good; Megatron makes one per receive. Two steps of 8 micro-batches."""
    program = programs_of(setup_of(implementation=implementation), 2)[1]
    size = HIDDEN_BYTES
    born = [
        program.owners[handle]
        for handle, where, requested in zip(program.mem_handle, program.mem_where, program.mem_bytes)
        if requested == size and not program.where(int(where))[1]
    ]
    assert Counter(born)[Owner.ACTIVATION] >= made
    stays = program.mem_kind[np.isin(program.mem_handle, np.flatnonzero(program.owners == Owner.ACTIVATION_GRADIENT))]
    assert (Counter(stays.tolist())[Mem.ALLOC] - Counter(stays.tolist())[Mem.FREE] == 8) == (
        implementation == "nanogpt"
    )


@pytest.mark.parametrize("pipeline", ["schedule: 1f1b", "schedule: interleaved, overlap_p2p: false"])
def test_megatron_computes_nothing_beside_what_it_sends(pipeline: str) -> None:
    """batch_isend_irecv and torch.cuda.synchronize: nothing is issued to a stage before what the rank sent has arrived, nor
    before what it waits for has (an interleaved rank receives early)."""
    setup = setup_of(pipeline, "megatron")
    programs = programs_of(setup, 1)
    lanes = play_time(
        setup, programs, [play_memory(program, "", 1 << 40, 1 << 40, setup.torch) for program in programs]
    )
    for rank, program in enumerate(programs):
        issued, ends = lanes[rank].issue_ns, lanes[rank].end_ns
        received = (program.row_kind == Row.RECEIVE) & (setup.pipeline.schedule == "1f1b")  # type: ignore[union-attr]
        sends = np.flatnonzero((program.row_kind == Row.SEND) | received)
        kernels = np.flatnonzero((program.row_kind == Row.LAUNCH) & (program.row_stream == COMPUTE))
        for send in sends.tolist():
            later = kernels[kernels > send]
            if len(later):
                assert issued[later[0]] >= ends[send], (rank, send)
        assert len(sends)


def test_compute_goes_on_beside_what_an_overlapping_schedule_sends() -> None:
    waits, goes_on = (
        simulate_setup(setup_of(f"schedule: interleaved, overlap_p2p: {overlaps}", "megatron")).time.step_ns  # type: ignore[union-attr]
        for overlaps in ("false", "true")
    )
    assert goes_on < waits


def test_tensor_ranks_send_a_share_each_and_gather_what_arrives() -> None:
    """Megatron's scatter_gather_tensors_in_pipeline."""
    text = GPT.format(
        pipeline="schedule: 1f1b, scatter_gather: true", implementation="megatron", micro_batches=8, tied="false",
        gpus=8, nodes=1, fsdp=", tensor: {degree: 2}",
    )  # fmt: skip
    shared, whole = (load_text(each).strategies[0] for each in (text, text.replace(", scatter_gather: true", "")))
    for rank, (program, other) in enumerate(zip(programs_of(shared, 1), programs_of(whole, 1))):
        assert {transfer.bytes for transfer in program.transfers} == {HIDDEN_BYTES // 2}
        received = int((program.row_kind == Row.RECEIVE).sum())
        assert received == (8 if rank in (0, 3) else 16)
        gathered = collectives_of(program) - collectives_of(other)
        assert gathered == {("all_gather", "tp"): received}
        assert kernels_of(program) == kernels_of(other)


def test_activations_of_in_flight_micro_batches_are_held() -> None:
    ranks = simulate_setup(setup_of(micro_batches=8)).ranks
    assert [rank.in_flight for rank in ranks] == [4, 3, 2, 1]
    activations = [rank.memory.owner_curves()[Owner.ACTIVATION] for rank in ranks[1:3]]
    first, second = (int(curve.max()) for curve in activations)
    per_micro_batch = first - second
    assert first - 3 * per_micro_batch == second - 2 * per_micro_batch
    assert first - 3 * per_micro_batch < per_micro_batch + 8 * HIDDEN_BYTES


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", 0), ("zb-h1", 8)])
def test_input_gradients_of_split_backwards_stay_until_the_next_step(schedule: str, held: int) -> None:
    """stage_backward_input leaves them in `.grad` of the received buffers; stage_backward takes them out."""
    program = programs_of(setup_of(f"schedule: {schedule}"), 2)[1]
    kept = Counter(program.owners[program.mem_handle[program.mem_kind == Mem.ALLOC]].tolist())
    kept.subtract(program.owners[program.mem_handle[program.mem_kind == Mem.FREE]].tolist())
    assert kept[int(Owner.ACTIVATION_GRADIENT)] == 8 + held  # buffers for gradients stay too


def test_tied_embeddings_add_up_their_gradients_on_both_ends() -> None:
    counts = [collectives_of(program)["all_reduce", "embedding"] for program in programs_of(setup_of(tied=True), 2)]
    assert counts == [2, 0, 0, 2]
    assert not any(
        collectives_of(program)["all_reduce", "embedding"]
        for program in programs_of(setup_of("schedule: zb-v", tied=True), 2)
    )


def test_the_gradient_norm_is_that_of_all_stages() -> None:
    assert [collectives_of(program)["all_reduce", "pp"] for program in programs_of(setup_of(), 2)] == [2] * 4


def test_fsdp_gathers_once_and_reduces_once_per_step_under_a_pipeline() -> None:
    """torchtitan keeps parameters gathered over a step's micro-batches; gradients are reduced at the last."""
    setup = setup_of(gpus=8, fsdp=", fsdp: {degree: 2}")
    for rank, program in enumerate(programs_of(setup, 1)):
        units = 2 + (rank in (0, 3))  # the root has parameters on the first and the last stage only
        counts = collectives_of(program)
        assert (counts["all_gather", "fsdp"], counts["reduce_scatter", "fsdp"]) == (units, units)


def test_fsdp_reduces_after_the_last_backward_was_computed_and_sent() -> None:
    """torch's perform_reduce_grad: no backward of a pipeline reduces; torch's schedules reduce behind the last."""
    for rank, program in enumerate(programs_of(setup_of(gpus=8, fsdp=", fsdp: {degree: 2}"), 1)):
        kind, argument = program.row_kind.tolist(), program.row_argument.tolist()
        backward = [row for row in range(len(kind)) if program.where(int(program.row_where[row]))[0] == Phase.BACKWARD]
        reduced = [
            row for row in backward
            if kind[row] == Row.COLLECTIVE and program.collectives[argument[row]].kind == "reduce_scatter"
        ]  # fmt: skip
        products = [
            row for row in backward
            if kind[row] == Row.LAUNCH and isinstance(program.kernels[argument[row]].work, Gemm)
        ]  # fmt: skip
        sent = [row for row in range(len(kind)) if kind[row] == Row.SEND]
        assert len(reduced) == 2 + (rank in (0, 3))
        assert reduced[0] > products[-1]
        assert reduced[0] > sent[-1]


def test_sends_cross_the_network_between_nodes() -> None:
    for gpus, nodes, crossing in ((4, 1, 0), (2, 2, 1), (1, 4, 3)):
        setup = setup_of(gpus=gpus, nodes=nodes)
        world = lower(programs_of(setup, 1), cost_model(setup), setup.mesh).world
        links = {meeting.links for meeting in world.meetings if meeting.bytes == HIDDEN_BYTES}
        forward = {link for (link,) in links}
        nics = {link // LINKS_PER_RANK for link in forward if link % LINKS_PER_RANK == NIC}
        assert len(nics) == (crossing + 1 if crossing else 0)  # sender of hidden states or of gradients


def test_waiting_for_stages_is_not_the_hosts_fault() -> None:
    ranks = simulate_setup(setup_of(micro_batches=4)).ranks
    for rank in ranks:
        assert rank.time is not None
        assert rank.time.waits_for_stages_ns > 0
        whole = rank.time.exposed_communication_ns + rank.time.waits_for_stages_ns + rank.time.host_bound_ns
        assert whole < rank.time.step_ns


def test_the_step_is_that_of_the_slowest_rank() -> None:
    outcome = simulate_setup(setup_of("placement: [1, 2, 2, 3]"))
    assert outcome.time is not None
    assert outcome.time.step_ns == max(rank.time.step_ns for rank in outcome.ranks if rank.time is not None)


def test_one_stage_that_does_not_fit_is_an_out_of_memory() -> None:
    setup = setup_of()
    need = [rank.steady.device_bytes for rank in simulate_setup(setup).ranks]
    cluster = replace(setup.cluster, usable_memory_bytes=(sorted(need)[-1] + sorted(need)[-2]) // 2)
    outcome = simulate_setup(replace(setup, cluster=cluster))
    assert not outcome.fits
    assert [rank.fits for rank in outcome.ranks] == [need_of < max(need) for need_of in need]
    assert outcome.worst is outcome.ranks[need.index(max(need))]
    assert outcome.time is None


def test_a_deadlock_names_who_waits_for_what() -> None:
    """Each of two ranks wants to receive before it sends."""
    setup = setup_of()
    states, gradient = Transfer(HIDDEN_BYTES, 0, 1, 0, 3), Transfer(HIDDEN_BYTES, 1, 0, 1, 2, backward=True)
    programs = [
        receives_then_sends(gradient, RECEIVE_NEXT, states, SEND_NEXT),
        receives_then_sends(states, RECEIVE_PREVIOUS, gradient, SEND_PREVIOUS),
    ]
    memories = [play_memory(program, "", 1 << 40, 1 << 40, setup.torch) for program in programs]
    with pytest.raises(DeadlockError) as caught:
        play_time(setup, programs, memories)
    text = str(caught.value)
    assert "waits to receive the gradient of micro-batch 2 from stage 1 (rank 1)" in text
    assert "waits to receive the hidden states of micro-batch 3 from stage 0 (rank 0)" in text


def receives_then_sends(received: Transfer, receive: int, sent: Transfer, send: int) -> Program:
    recorder = Recorder()
    recorder.transfer(Row.RECEIVE, received, receive)
    recorder.stream_waits_stream(send, receive)
    recorder.transfer(Row.SEND, sent, send)
    return recorder.program()


def test_phases_of_moves_are_those_of_what_moves() -> None:
    program = programs_of(setup_of(), 1)[1]
    for row in range(len(program.row_kind)):
        if program.row_kind[row] in (Row.SEND, Row.RECEIVE):
            transfer = program.transfers[program.row_argument[row]]
            assert program.row_stream[row] != COMPUTE
            assert program.where(int(program.row_where[row]))[0] is (
                Phase.BACKWARD if transfer.backward else Phase.FORWARD
            )


def test_the_host_waits_for_transfers_only_where_megatron_does() -> None:
    """batch_p2p_sync: a wait for every transfer of 1F1B; streams alone for DeepSpeed's engine, for the same transfers."""
    kinds = []
    for sync in ("true", "false"):
        setup = setup_of(f"schedule: 1f1b, p2p_sync: {sync}", "megatron")
        kinds.append(Counter(record(setup, 1, rank=1).row_kind.tolist()))
    synced, streamed = kinds
    moved = synced[Row.SEND] + synced[Row.RECEIVE]
    assert moved == streamed[Row.SEND] + streamed[Row.RECEIVE] == 4 * 8
    assert synced[Row.SYNC] - streamed[Row.SYNC] == streamed[Row.WAIT] - synced[Row.WAIT] == moved
