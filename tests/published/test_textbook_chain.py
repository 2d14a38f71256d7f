"""The textbook's arithmetic, played on the chain: closed forms against simulated timelines."""

from __future__ import annotations

import math

import numpy as np
import pytest

import sim
from sim.scenario import load_text

MIB = 1 << 20


def chain(
    strategies: str, *, layers: int = 48, entry: int = 16, activation: int | str = 128, **more: object
) -> sim.Result:
    """Play a chain; sizes in MiB, further fields as in the scenario."""
    fields = {"layers": layers, "entry": f"{entry} MiB", "forward": "20 us", "backward": "40 us"}
    fields |= {"activation": activation if isinstance(activation, str) else f"{activation} MiB", **more}
    inline = ", ".join(f"{k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in fields.items())
    return sim.simulate(load_text(f"model: {{chain: {{{inline}}}}}\nstrategies: {strategies}\n", "chain"))


def peak_mib(outcome: sim.Outcome) -> float:
    return outcome.steady.active_bytes / MIB


@pytest.mark.parametrize(
    ("shares_entry", "expected"),
    [(False, [896, 640, 640, 704]), (True, [880, 624, 624, 688])],
    ids=["entry beside activations", "entry shared as PyTorch does"],
)
def test_segments_of_48_layers_peak_where_the_textbook_says(shares_entry: bool, expected: list[int]) -> None:
    strategies = "{" + ", ".join(f"k{k}: {{checkpoint: {{segment: {k}}}}}" for k in range(1, 5)) + "}"
    result = chain(strategies, shares_entry=shares_entry)
    assert [peak_mib(o) for o in result.outcomes] == expected


@pytest.mark.parametrize("shares_entry", [False, True])
def test_the_whole_curve_over_segment_lengths_is_the_closed_form(shares_entry: bool) -> None:
    n, entry, activation = 48, 16, 128
    lengths = range(1, n + 1)
    strategies = "{" + ", ".join(f"k{k}: {{checkpoint: {{segment: {k}}}}}" for k in lengths) + "}"
    result = chain(strategies, shares_entry=shares_entry)
    shared = entry if shares_entry else 0
    # the peak sits in the last region; where that one is short, in the last full one, with one entry less behind it
    closed = []
    for k in lengths:
        regions, rest = math.ceil(n / k), n % k
        full = (regions - (1 if rest else 0)) * entry + k * activation - shared
        closed.append(max(full, regions * entry + (rest or k) * activation - shared))
    assert [peak_mib(o) for o in result.outcomes] == closed
    textbook = [math.ceil(n / k) * entry + k * activation - shared for k in lengths]
    assert all(t - entry <= c <= t for c, t in zip(closed, textbook))


def test_without_checkpoint_memory_is_a_sawtooth_with_its_peak_at_the_end_of_forward() -> None:
    outcome = chain("{none: {}}")["none"]
    first, last = outcome.memory.steps()[-1]
    curve = outcome.memory.active_bytes[first:last]
    top = int(np.argmax(curve))
    assert curve[top] == 48 * 128 * MIB
    assert (np.diff(curve[: top + 1]) >= 0).all()
    assert (np.diff(curve[top:]) <= 0).all()
    assert outcome.peak.phase.name == "FORWARD"
    assert outcome.peak.path == "layers.47"


def test_a_step_is_forward_backward_and_what_communication_nobody_hides() -> None:
    """F 20, B 40, exposed 10 ms: 70 ms; recompute 20: 90 (+28.6 %); 5 ms more that cannot hide: 95 (+35.7 %)."""
    more = {"forward": "5 ms", "backward": "10 ms", "recompute": "5 ms", "exposed_communication": "10 ms"}
    both = "{none: {}, full: {checkpoint: {every: 1}}}"
    result = chain(both, layers=4, **more)
    steps_ms = [o.time.step_ns / 1e6 for o in result.outcomes if o.time]
    assert steps_ms == [70.0, 90.0]
    assert round(steps_ms[1] / steps_ms[0] - 1, 3) == 0.286
    exposed = chain(both, layers=4, recompute_communication="5 ms", **more)
    slower_ms = [o.time.step_ns / 1e6 for o in exposed.outcomes if o.time]
    assert slower_ms == [70.0, 95.0]
    assert round(slower_ms[1] / slower_ms[0] - 1, 3) == 0.357
    assert [o.time.exposed_communication_ns / 1e6 for o in exposed.outcomes if o.time] == [10.0, 15.0]


def test_recomputing_everything_costs_one_forward() -> None:
    """4/3 of a step where backward is twice forward and nothing is stopped early."""
    result = chain("{none: {}, full: {checkpoint: {every: 1}}}", layers=6)
    none, full = (o.time for o in result.outcomes)
    assert none is not None and full is not None
    assert full.step_ns * 3 == none.step_ns * 4
    assert full.recompute_of_forward == 1.0
    assert full.recompute_of_step == pytest.approx(1 / 3, rel=1e-12)


def test_first_n_layers_every_k() -> None:
    """Of 12 layers the first 8 in regions of 2: 4 entries stay, 4 layers keep everything."""
    outcome = chain("{mixed: {checkpoint: {segment: 2, first: 8}}}", layers=12)["mixed"]
    entry, activation = 16, 128
    end_of_forward = 4 * entry + 4 * activation
    last_region = 4 * entry + 2 * activation
    assert peak_mib(outcome) == max(end_of_forward, last_region)
    assert outcome.time is not None
    assert outcome.time.recompute_ns == 8 * 20_000


def test_every_second_layer_recomputes_half() -> None:
    outcome = chain("{half: {checkpoint: {every: 2}}}", layers=12)["half"]
    assert outcome.time is not None
    assert outcome.time.recompute_ns == 6 * 20_000
    assert peak_mib(outcome) == 6 * 16 + 6 * 128 + 128  # all kept layers, all entries, the last layer again


def test_an_uneven_chain_peaks_where_its_heavy_layer_is() -> None:
    result = chain("{full: {checkpoint: {every: 1}}}", layers=3, activation="[10 MiB, 300 MiB, 20 MiB]")
    outcome = result["full"]
    assert peak_mib(outcome) == 2 * 16 + 300
    assert outcome.peak.path == "layers.1"


def test_a_micro_batch_of_two_is_worth_it_when_it_costs_less_than_twice() -> None:
    """Micro-batch 1 in 80 ms against 2 in 130 ms: 12.5 and 15.38 samples/s, +23.1 %."""
    one = chain("{a: {}}", layers=4, forward="8 ms", backward="12 ms")["a"]
    two = chain("{a: {}}", layers=4, forward="13 ms", backward="19.5 ms")["a"]
    assert one.time is not None and two.time is not None
    rates = 1e9 / one.time.step_ns, 2e9 / two.time.step_ns
    assert [round(r, 2) for r in rates] == [12.5, 15.38]
    assert round(rates[1] / rates[0] - 1, 3) == 0.231


@pytest.mark.parametrize("segments", [[4], [1, 1, 1, 1], [2, 2], [3, 1]])
def test_the_gradient_of_a_doubling_chain_is_16_however_it_is_cut(segments: list[int]) -> None:
    """x -> 2x, four layers: a lab in NumPy. Recomputing a segment from its entry changes no value."""
    x = np.array([3.0])
    entries = [x]
    for length in segments:
        value = entries[-1]
        for _ in range(length):
            value = 2 * value
        entries.append(value)
    gradient = np.ones_like(x)
    for entry, length in zip(entries[-2::-1], reversed(segments)):
        inputs = [entry]
        for _ in range(length):  # recompute
            inputs.append(2 * inputs[-1])
        for _ in reversed(inputs[:-1]):
            gradient = gradient * 2
    assert entries[-1] == 16 * x
    assert gradient == 16
