"""What a published row measured: times and memory by the definition of its source."""

from __future__ import annotations

import pytest

from sim.checks import measured
from sim.checks.facts import facts_of
from sim.checks.software import software_of
from tests.unit.published_rows import row


def test_times_by_the_definition_of_the_source() -> None:
    assert measured.step_s(facts_of(row(step_time_s="2.5")), 4096) == 2.5
    assert measured.step_s(facts_of(row()), 8 * 1000) == 0.01
    ptdp = facts_of(row(source="Narayanan et al. 2021 PTD-P", tokens_per_s_per_gpu="", tflops_per_gpu="100"))
    flops = 96 * 4096 * 2 * 256**2 * (1 + 256 / (6 * 256) + 1024 / (16 * 2 * 256))
    assert measured.step_s(ptdp, 4096) == pytest.approx(flops / (8 * 100e12))
    assert measured.step_s(facts_of(row(tokens_per_s_per_gpu="")), 4096) is None
    assert measured.step_s(facts_of(row(step_time_s="2.5", notes="tiny, use memory only")), 4096) is None


def test_memory_of_the_ranks_that_the_notes_name() -> None:
    assert measured.ranks(facts_of(row()), 4) == range(4)
    assert measured.ranks(facts_of(row(notes="peak on the LAST rank (last stage)")), 4) == range(3, 4)
    assert measured.ranks(facts_of(row(notes="rank0 peak; rank7 less")), 8) == range(1)


@pytest.mark.parametrize(
    ("source", "notes", "counter"),
    [
        ("torchtitan benchmarks", "", "reserved"),
        ("torchtitan PR#165", "peak_mem = ACTIVE 24.81% of 95 GiB; reserved 33 %", "active"),
        ("Megatron-LM goldens", "torch allocated_bytes.all.peak on the last rank", "allocated"),
        ("BigScience", "nvidia-smi style", "device"),
        ("somebody", "", "allocated"),
    ],
)
def test_memory_by_the_definition_of_the_source(source: str, notes: str, counter: str) -> None:
    facts = facts_of(row(source=source, notes=notes))
    assert measured.counter(facts, software_of(facts)) == counter


def test_where_samples_vary_the_longest_makes_the_memory_and_no_time_is_compared() -> None:
    notes = "variable-length samples, memory peak is set by the longest sample (1304 tokens) and time by the mean"
    facts = facts_of(row(seq_len="", notes=notes))
    assert facts.seq_len == 1304 and facts.tokens_per_s_per_gpu is None
