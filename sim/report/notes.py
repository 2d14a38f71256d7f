"""What a setting cannot do here, and why: sentences for people, from the set-up and the owners at the peak, and from
strategies beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from sim.api import Outcome, has_allocator
from sim.model.config import ModelConfig
from sim.program.program import Owner, Phase
from sim.scenario.setup import Scenario, Setup
from sim.units import format_bytes

if TYPE_CHECKING:
    from sim.report.summary import StrategySummary

SAVED = (Owner.ACTIVATION, Owner.CHECKPOINT, Owner.RECOMPUTED)
STATE = (Owner.PARAMETER, Owner.GRADIENT, Owner.OPTIMIZER, Owner.GATHERED, Owner.REDUCE_SCATTER)
HEADS = ("loss", "output", "head", "lm_head", "output_layer")
FEW = 0.1  # of the peak
MUCH = 0.25
MOST = 0.5
PAID, LITTLE = 0.02, 0.02
"""More time, less memory: what recomputation must be worth."""
WAITING = 0.01


def notes(outcome: Outcome) -> tuple[str, ...]:
    """Whole sentences; none where every setting does what it is for."""
    return tuple(_notes(outcome))


def _notes(outcome: Outcome) -> Iterator[str]:
    setup, peak = outcome.setup, outcome.peak
    if setup.checkpoint is not None:
        yield from _about_checkpoint(outcome)
    saved = outcome.owners.get(Owner.ACTIVATION, 0)
    if isinstance(setup.model, ModelConfig) and setup.model.lora is not None and saved > MUCH * peak.bytes:
        yield (
            f"Adapters spare gradients and optimizer states, not activations: {format_bytes(saved)} of the peak, which"
            " checkpointing lowers."
        )
    early = peak.phase in (Phase.FORWARD, Phase.LOSS) or peak.path in HEADS
    if setup.optimizer is not None and setup.optimizer.in_backward and early:
        yield "Steps inside backward do not lower this peak: it comes before most gradients do."
    experts = setup.model.experts if isinstance(setup.model, ModelConfig) else None
    if experts is not None and experts.imbalance == 1:
        yield "Every expert gets as many tokens as any other: assumed (model.experts.imbalance says otherwise)."
    if setup.mode == "eval":
        yield "Without torch.no_grad() a graph is built that nobody walks back: its activations live until the loss dies."
    if not has_allocator(setup):
        yield "No allocator was played: reserved bytes are taken as allocated ones, fragmentation is left out (assumed)."
    waiting = outcome.steady.active_bytes - outcome.steady.allocated_bytes
    if waiting > WAITING * peak.bytes:
        yield (
            f"Of the peak {format_bytes(waiting)} are freed and wait for streams that used them (record_stream): how much"
            " depends on the times, so that this figure is as good as they are."
        )


def _about_checkpoint(outcome: Outcome) -> Iterator[str]:
    setup, owners, peak = outcome.setup, outcome.owners, outcome.peak
    checkpoint = setup.checkpoint
    assert checkpoint is not None
    if setup.mode == "no_grad":
        yield "Checkpointing has no effect under no_grad: nothing is saved, nothing recomputed."
        return
    saved = sum(owners.get(owner, 0) for owner in SAVED)
    state = sum(owners.get(owner, 0) for owner in STATE)
    if saved < FEW * peak.bytes:
        rest = "the loss is" if owners.get(Owner.LOSS, 0) > state else "parameters, gradients and optimizer states are"
        yield f"More checkpointing hardly lowers this peak: activations are {saved / peak.bytes:.0%} of it, {rest} more."
    elif state > MOST * peak.bytes:
        yield (
            f"Checkpointing does not touch parameters, gradients and optimizer states: {format_bytes(state)} of the peak,"
            " whatever is recomputed."
        )
    longest = longest_region(setup)
    again = owners.get(Owner.RECOMPUTED, 0)
    if longest > 1 and again > MUCH * peak.bytes:
        yield f"The regions are long: one of {longest} layers holds {format_bytes(again)} of the peak while it runs again."
    core = "core_attention" in checkpoint.inside
    if core and isinstance(setup.model, ModelConfig) and setup.model.attention == "sdpa":
        yield "The fused attention kernel keeps no scores: recomputing it saves next to nothing."


def longest_region(setup: Setup) -> int:
    """Layers that are recomputed at once."""
    checkpoint, layers = setup.checkpoint, setup.model.layers
    if checkpoint is None or checkpoint.layers or checkpoint.inside or checkpoint.discard:
        return 1
    if checkpoint.boundaries:
        edges = (0, *checkpoint.boundaries, layers)
        return max(stop - start for start, stop in pairwise(edges))
    if checkpoint.sequential is not None:
        return layers // checkpoint.sequential
    for count in checkpoint.nested:
        layers = -(-layers // count)
    return layers if checkpoint.nested else checkpoint.segment


def between(scenario: Scenario, strategies: Sequence[StrategySummary]) -> tuple[str, ...]:
    """What strategies say of each other: mistakes that show only in a comparison."""
    setups = {setup.name: setup for setup in scenario.strategies}
    return tuple(
        chain(
            _different_tokens(strategies),
            _without_effect(strategies),
            _wrapped_in_vain(strategies, setups),
            _kept_by_the_allocator(strategies),
        )
    )


def _different_tokens(strategies: Sequence[StrategySummary]) -> Iterator[str]:
    by_tokens: dict[int, list[str]] = {}
    for s in strategies:
        if s.tokens_per_step is not None and s.step_time_s is not None:
            by_tokens.setdefault(s.tokens_per_step, []).append(s.name)
    if len(by_tokens) > 1:
        parts = [f"{tokens:,} in {_named(names)}" for tokens, names in by_tokens.items()]
        yield f"Tokens per step differ ({'; '.join(parts)}): compare tokens per second, not step times."


def _without_effect(strategies: Sequence[StrategySummary]) -> Iterator[str]:
    """Strategies that come out alike in every figure."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for s in strategies:
        figures = (s.step_time_s, s.first_step, s.peak_allocated_bytes, s.peak_active_bytes, s.peak_reserved_bytes)
        alike.setdefault((*figures, s.tokens_per_step, s.peak.phase, s.peak.layer, s.peak.op), []).append(s.name)
    for names in alike.values():
        if len(names) > 1:
            yield f"{_named(names)} are alike in every figure: what they differ in has no effect here."


def _wrapped_in_vain(strategies: Sequence[StrategySummary], setups: dict[str, Setup]) -> Iterator[str]:
    """Recomputation that is paid for and lowers nothing, against the same set-up without it."""
    for s in strategies:
        setup = setups[s.name]
        if setup.checkpoint is None or s.step_time_s is None:
            continue
        plain = next((p for p in strategies if setups[p.name] == replace(setup, name=p.name, checkpoint=None)), None)
        if plain is None or plain.step_time_s is None or s.step_time_s < (1 + PAID) * plain.step_time_s:
            continue
        saved = plain.peak_active_bytes - s.peak_active_bytes
        if saved < LITTLE * plain.peak_active_bytes:
            price = s.step_time_s / plain.step_time_s - 1
            start = f"{s.name} recomputes for {price:.0%} more time than {plain.name} and"
            if saved < 0:
                yield (
                    f"{start} raises the peak by {format_bytes(-saved)}: a region that runs again is there beside what"
                    " backward holds anyway."
                )
            else:
                yield (
                    f"{start} lowers the peak by {format_bytes(saved)} only: what its regions wrap is not what holds"
                    " the peak."
                )


def _kept_by_the_allocator(strategies: Sequence[StrategySummary]) -> Iterator[str]:
    """Less allocated than in the first strategy, but about as much reserved."""
    for s in strategies[1:]:
        first = strategies[0]
        allocated = first.peak_allocated_bytes - s.peak_allocated_bytes
        reserved = first.peak_reserved_bytes - s.peak_reserved_bytes
        if allocated > FEW * first.peak_allocated_bytes and reserved < allocated / 2:
            yield (
                f"{s.name} allocates {format_bytes(allocated)} less than {first.name} and reserves"
                f" {format_bytes(reserved) if reserved > 0 else 'none'} less: what is freed stays in segments that other"
                " sizes or streams do not fit (allocator: expandable_segments:True lets them grow and shrink)."
            )


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
