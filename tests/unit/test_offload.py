"""Offload: what leaves, who waits for it, what pinning costs, and when bytes come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.api import Outcome, cost_model, shown_lanes, simulate_setup
from sim.cost.copy import host_links
from sim.cost.model import CostModel
from sim.engine.links import share
from sim.hardware.catalogue import find_gpu
from sim.program.program import (
    COMPUTE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    REDUCE_SCATTER,
    Mem,
    Owner,
    Program,
    Row,
)
from sim.report.picture import SHADES, STALL, picture_of
from sim.runtime.host_memory import HostMemory
from sim.runtime.lower import DOWN, DOWN_WEIGHT, UP
from sim.runtime.record import record
from sim.runtime.recorder import Recorder
from sim.scenario import load_text
from sim.scenario.setup import Setup

LAYERS = 4
TEXT = """
model: {preset: llama-tiny, implementation: torchtitan}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 512}
parallel: {fsdp: {degree: 8}}
"""
STREAMED = "offload: {what: activations"


def setup_of(more: str = "", text: str = TEXT) -> Setup:
    return load_text(text + more + "\n", "offload").strategies[0]


def run(more: str = "", text: str = TEXT) -> Outcome:
    return simulate_setup(setup_of(more, text))


def copied(program: Program, direction: str) -> list[int]:
    """Sizes of the copies in a direction, in issue order."""
    numbers = program.row_argument[program.row_kind == Row.COPY].tolist()
    return [program.copies[n].bytes for n in numbers if program.copies[n].direction == direction]


def kinds_after(program: Program, direction: str) -> set[tuple[int, int]]:
    """Kinds of the two rows after every copy in a direction."""
    found = set()
    for row in np.flatnonzero(program.row_kind == Row.COPY).tolist():
        if program.copies[program.row_argument[row]].direction == direction:
            found.add((int(program.row_kind[row + 1]), int(program.row_kind[row + 2])))
    return found


def alive_at(program: Program, mark: str) -> set[int]:
    stop = next(m.memory_events for m in program.marks if m.name == mark)
    kinds, handles = program.mem_kind[:stop], program.mem_handle[:stop]
    return set(handles[kinds == Mem.ALLOC].tolist()) - set(handles[kinds == Mem.FREE].tolist())


# -- save_on_cpu -------------------------------------------------------------------------------------------------------
def test_save_on_cpu_waits_for_every_pinned_copy_out_and_for_none_back() -> None:
    program = record(setup_of("offload: {what: saved_tensors}"))
    assert kinds_after(program, "device_to_host") == {(Row.RECORD, Row.SYNC)}
    assert (Row.RECORD, Row.SYNC) not in kinds_after(program, "host_to_device")
    assert set(program.row_stream[program.row_kind == Row.COPY].tolist()) == {COMPUTE}
    assert copied(program, "device_to_host") and sorted(copied(program, "device_to_host")) == sorted(
        copied(program, "host_to_device")
    )


def test_save_on_cpu_with_pageable_memory_waits_both_ways_and_is_slower() -> None:
    pageable = "offload: {what: saved_tensors, pinned: false}"
    program = record(setup_of(pageable))
    assert kinds_after(program, "host_to_device") == {(Row.RECORD, Row.SYNC)}
    slow, fast = run(pageable), run("offload: {what: saved_tensors}")
    assert slow.time is not None and fast.time is not None
    assert slow.time.step_ns > fast.time.step_ns
    assert (program.host_bytes[-1], program.host_bytes.min()) == (0, 0)


def test_save_on_cpu_without_checkpointing_moves_the_weights_too() -> None:
    program = record(setup_of("offload: {what: saved_tensors}", TEXT.replace("512}", "384}")), steps=1)
    assert copied(program, "device_to_host").count(2 * 512 * 1536) == 3 * LAYERS  # w1, w2 and w3


# -- host memory -------------------------------------------------------------------------------------------------------
def test_a_pinned_pool_pays_once_and_rounds_up_to_powers_of_two() -> None:
    recorder = Recorder()
    memory = HostMemory(recorder)
    blocks = [memory.take(3000), memory.take(4096)]
    for block in blocks:
        memory.give(block)
    assert [memory.take(4000), memory.take(2049)] == blocks == [4096, 4096]
    program = recorder.program()
    assert (program.row_kind == Row.HOST).sum() == 2
    assert program.host_bytes.tolist() == [4096, 8192, 8192, 8192, 8192, 8192]  # held by the cache
    assert program.host_used.tolist() == [4096, 8192, 4096, 0, 4096, 8192]


def test_pinning_anew_costs_three_milliseconds_a_tensor() -> None:
    setup = setup_of("offload: {what: saved_tensors, layers: all, pinned_pool: false}\ncheckpoint: {}")
    program, cost = record(setup), cost_model(setup)
    pins = [w for w in program.host_works if w.name == "cuda_host_alloc"]
    rows = (program.row_kind == Row.HOST) & (program.row_argument == program.host_works.index(pins[0]))
    assert rows.sum() == len(copied(program, "device_to_host"))
    assert cost.host_work_ns(pins[0]) == 3_000_000


# -- streamed ----------------------------------------------------------------------------------------------------------
def test_streamed_copies_run_on_streams_of_their_own() -> None:
    program = record(setup_of(f"{STREAMED}}}"))
    copies = program.row_kind == Row.COPY
    for direction, stream in (("device_to_host", DEVICE_TO_HOST), ("host_to_device", HOST_TO_DEVICE)):
        numbers = [i for i, copy in enumerate(program.copies) if copy.direction == direction]
        assert set(program.row_stream[copies & np.isin(program.row_argument, numbers)].tolist()) == {stream}


def test_all_but_the_last_layer_leave_and_parameters_stay() -> None:
    program = record(setup_of(f"{STREAMED}}}", TEXT.replace("512}", "384}")), steps=1)
    leaving = program.row_where[(program.row_kind == Row.COPY) & (program.row_stream == DEVICE_TO_HOST)]
    assert {program.where(w)[1].split(".")[1] for w in leaving.tolist()} == {"0", "1", "2"}
    assert 2 * 512 * 1536 not in copied(program, "device_to_host")


def test_a_tensor_that_two_operators_save_leaves_once() -> None:
    """w1 and w3 of a layer save the same input."""
    streamed = record(setup_of(f"{STREAMED}, layers: all, above: 2 KiB}}"), steps=1)
    blocking = record(setup_of("offload: {what: saved_tensors, layers: all}"), steps=1)
    tokens_by_hidden = 2 * 512 * 512
    assert copied(streamed, "device_to_host").count(tokens_by_hidden) < copied(blocking, "device_to_host").count(
        tokens_by_hidden
    )


def test_tensors_below_a_size_stay() -> None:
    program = record(setup_of(f"{STREAMED}, above: 1 MiB}}"))
    assert min(copy.bytes for copy in program.copies) >= 1 << 20


def test_a_ratio_takes_the_first_layers() -> None:
    offload = setup_of(f"{STREAMED}, layers: ratio 0.5}}").offload
    assert offload is not None and offload.layers == (0, 1)


def test_the_bound_on_copies_in_flight_holds_after_every_copy() -> None:
    """Bytes that wait for their copy are freed in order: no more than so many tensors leave at once."""
    held = []
    for in_flight in (1, 2, 1000):
        program = record(setup_of(f"{STREAMED}, in_flight: {in_flight}}}"), steps=1)
        live = alive_at(program, "s0.fwd0")
        held.append(sum(1 for h in live if program.owners[h] == Owner.ACTIVATION))
    assert held[0] + 1 == held[1] < held[2]


def test_what_comes_back_is_fetched_before_backward_gets_there() -> None:
    def wait_ns(look_ahead: int) -> float:
        copies = run(f"{STREAMED}, look_ahead: {look_ahead}}}", TEXT.replace("512}", "8192}")).copies
        assert copies is not None
        return copies.back_wait_ns

    assert wait_ns(1) < wait_ns(0)


@pytest.mark.parametrize(
    "more",
    [
        f"{STREAMED}}}",
        f"{STREAMED}, layers: all, look_ahead: 0, in_flight: 1}}",
        f"{STREAMED}, look_ahead: 3}}\ncheckpoint: {{first: 2}}",
        "offload: {what: checkpoint_inputs, streams: side}\ncheckpoint: {}",
        "offload: {what: checkpoint_inputs}\ncheckpoint: {save: [attention]}",
        "offload: {what: saved_tensors, layers: ratio 0.5, pinned: false}",
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_nothing_is_left_behind(more: str, accumulation: int) -> None:
    """Every step ends with what the first one ended with, on the device and in the host's tensors."""
    text = TEXT.replace("512}", f"512, accumulation: {accumulation}}}")
    program = record(setup_of(more, text), steps=3)
    assert len(alive_at(program, "s0.end")) == len(alive_at(program, "s2.end"))
    out, back = copied(program, "device_to_host"), copied(program, "host_to_device")
    assert len(out) % 3 == 0 == len(back) % 3
    assert sum(back) <= sum(out)


def test_offload_and_recomputation_mix_in_one_model() -> None:
    plain, mixed = run("checkpoint: {first: 2}"), run(f"checkpoint: {{first: 2}}\n{STREAMED}, layers: [2, 3]}}")
    assert plain.time is not None and mixed.time is not None
    assert mixed.time.recomputed_flops == plain.time.recomputed_flops > 0
    assert mixed.time.flops == plain.time.flops


# -- FSDP's CPU offload ------------------------------------------------------------------------------------------------
def test_cpu_offload_copies_parameters_in_and_gradients_out_and_the_cpu_steps() -> None:
    text = TEXT.replace("degree: 8", "degree: 8, cpu_offload: true")
    outcome = run("", text)
    program = outcome.program
    copies = program.row_kind == Row.COPY
    out = [i for i, copy in enumerate(program.copies) if copy.direction == "device_to_host"]
    assert set(program.row_stream[copies & np.isin(program.row_argument, out)].tolist()) == {REDUCE_SCATTER}
    parameters = sum(copied(record(setup_of("", text), steps=1), "device_to_host"))
    assert parameters == outcome.copies.out_bytes if outcome.copies else None
    assert not {Owner.OPTIMIZER, Owner.GRADIENT} & set(outcome.owners)
    works = {work.name: work.count for work in program.host_works}
    assert works["cpu_memory_mib"] in (-(-7 * parameters // (1 << 20)), -(-3 * parameters // (1 << 20)))
    assert outcome.host_peak_bytes >= 4 * parameters


def test_the_cpu_adds_gradients_of_further_micro_batches_and_waits_for_each() -> None:
    text = TEXT.replace("degree: 8", "degree: 8, cpu_offload: true").replace("512}", "512, accumulation: 2}")
    program = record(setup_of("", text), steps=1)
    reduced = (program.row_kind == Row.SYNC).sum()
    alone = (record(setup_of("", text.replace(", accumulation: 2", "")), steps=1).row_kind == Row.SYNC).sum()
    assert reduced > 2 * alone


# -- links -------------------------------------------------------------------------------------------------------------
def test_copies_of_all_gpus_share_the_memory_of_their_numa_half() -> None:
    gpu = find_gpu("a100")
    model = CostModel.for_gpu(gpu)
    alone, crowded = model.host_links(1), model.host_links(8)
    assert alone.shared_bytes_per_s == pytest.approx(1.43 * 25.8e9)
    assert crowded.shared_bytes_per_s == pytest.approx(16.5e9)
    seven = host_links(model.profile.figures, gpu, 7)  # the fuller half decides
    assert crowded.shared_bytes_per_s == seven.shared_bytes_per_s
    coherent = CostModel.for_gpu(find_gpu("gh200")).host_links(1)
    assert coherent.host_to_device_bytes_per_s > 5 * alone.host_to_device_bytes_per_s


def test_no_link_carries_more_than_it_can_and_all_bytes_arrive() -> None:
    outcome = run(f"{STREAMED}}}", TEXT.replace("512}", "8192}"))
    copies, links = outcome.copies, cost_model(outcome.setup).host_links(8)
    assert copies is not None
    assert copies.out_bytes_per_s <= min(links.device_to_host_bytes_per_s, links.shared_bytes_per_s) * (1 + 1e-9)
    assert copies.back_bytes_per_s <= min(links.host_to_device_bytes_per_s, links.shared_bytes_per_s) * (1 + 1e-9)


# -- shown -------------------------------------------------------------------------------------------------------------
def test_a_picture_shows_the_copy_lanes_and_the_stalls() -> None:
    outcome = run(f"{STREAMED}}}", TEXT.replace("512}", "8192}"))
    picture = picture_of(outcome, shown_lanes(outcome))
    assert {"to host", "from host"} <= {lane.name for lane in picture.lanes}
    assert picture.host is not None
    times_ms, used = picture.host
    assert (used[0], used[-1], used.max()) == (0, 0, outcome.host_peak_bytes)
    assert (np.diff(times_ms) >= 0).all() and times_ms[-1] <= picture.step_ms
    stalls = picture.lanes[0].work[STALL]
    assert outcome.copies is not None
    lengths_ms, shares = stalls[:, 1] - stalls[:, 0], stalls[:, 2]
    too_much_ms = (lengths_ms * shares).sum() - outcome.copies.exposed_ns * 1e-6  # shares are rounded up to eighths
    assert 0 <= too_much_ms <= lengths_ms[shares < 1].sum() / SHADES + 1e-9


def test_host_memory_that_is_too_small_is_said() -> None:
    outcome = run(f"{STREAMED}}}")
    assert outcome.fits_host
    small = replace(
        outcome,
        setup=setup_of(f"{STREAMED}}}", TEXT.replace("gpus_per_node: 8", "gpus_per_node: 8, host_memory: 1 MiB")),
    )
    assert not small.fits_host
    assert outcome.node_host_bytes == 8 * outcome.host_peak_bytes


def test_both_ways_at_once_an_a100_copies_24_gb_per_s_out_and_12_back() -> None:
    """NVIDIA/nvbandwidth#11: 24-25 and 11-13 GB/s."""
    links = CostModel.for_gpu(find_gpu("a100")).host_links(1)
    capacity = [links.device_to_host_bytes_per_s, links.host_to_device_bytes_per_s, links.shared_bytes_per_s]
    out, back = share([capacity[DOWN - DOWN], capacity[UP - DOWN]], [(0, 2), (1, 2)], capacity, [DOWN_WEIGHT, 1])
    assert 24e9 < out < 25e9 and 11e9 < back < 13e9


# -- in a pipeline -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("what", ["activations, layers: all", "saved_tensors", "saved_tensors, layers: all"])
def test_every_stage_of_a_pipeline_gets_back_what_left(what: str, schedule: str) -> None:
    text = f"""
model: {{preset: llama-tiny, implementation: torchtitan, layers: 8}}
cluster: {{gpu: h100, gpus_per_node: 4}}
batch: {{micro_batch: 1, seq_len: 256, accumulation: 8}}
precision: {{parameters: bf16, compute: bf16}}
parallel: {{pipeline: {{degree: 4, schedule: {schedule}}}}}
offload: {{what: {what}}}
"""
    outcome = run("", text)
    assert len(outcome.ranks) == 4
    for rank in outcome.ranks:
        out, back = (copied(rank.program, way) for way in ("device_to_host", "host_to_device"))
        assert out and rank.program.host_used[-1] == 0
        assert sum(back) <= sum(out) if "activations" in what else set(back) == set(out)
