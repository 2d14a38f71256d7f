"""Usual complaints: a guide for each, and what the played strategy has to say about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from sim.api import Outcome, has_allocator
from sim.model.config import ModelConfig
from sim.program.program import Owner
from sim.report.errors import RunError
from sim.report.evidence import evidence
from sim.report.explain import Played
from sim.report.knob import phase_peaks
from sim.report.notes import longest_region
from sim.report.summary import tokens_per_step
from sim.report.words import duration_with_range, place, short_op
from sim.scenario.problems import nearest_name
from sim.timeline.metrics import outside_bytes
from sim.units import format_bytes, format_duration

SHOWN_OWNERS = 4
LITTLE = 0.03
"""Of the reserved bytes: so little between them and the active ones is no fragmentation."""


def _gradients(outcome: Outcome) -> Iterator[str]:
    setup, checkpoint = outcome.setup, outcome.setup.checkpoint
    if checkpoint is None:
        yield "This strategy recomputes nothing: look elsewhere."
        return
    if checkpoint.reentrant:
        yield "This strategy uses the reentrant form: start with its rules."
    else:
        yield "This strategy recomputes; its form restores PyTorch's generators and no other state."
    dropout = isinstance(setup.model, ModelConfig) and setup.model.dropout > 0
    yield f"The model has {'dropout, whose masks these generators draw again' if dropout else 'no dropout'}."


def _backward(outcome: Outcome) -> Iterator[str]:
    for name, size in phase_peaks(outcome).items():
        yield f"{name}: {format_bytes(size)} active at most"
    peak, owners = outcome.peak, list(outcome.owners.items())
    held = ", ".join(f"{owner.label} {format_bytes(size)}" for owner, size in owners[:SHOWN_OWNERS])
    where = place(peak.phase.name.lower(), peak.path)
    yield f"The peak, {format_bytes(peak.bytes)}, is in {where} ({short_op(peak.operator, peak.phase.name.lower())}): {held}."
    again, longest = outcome.owners.get(Owner.RECOMPUTED, 0), longest_region(outcome.setup)
    if again and longest > 1:
        yield f"A region of {longest} layers runs again at once; try --knob checkpoint.segment=1."
    elif outcome.owners.get(Owner.LOSS, 0) == max(outcome.owners.values(), default=0) > 0:
        yield "The loss holds most: checkpointing layers does not touch it; try --knob model.loss_chunks=8."


def _reserved(outcome: Outcome) -> Iterator[str]:
    steady = outcome.steady
    idle = steady.reserved_bytes - steady.active_bytes
    peaks = f"{format_bytes(steady.allocated_bytes)} allocated, {format_bytes(steady.active_bytes)} active"
    yield f"Peaks: {peaks}, {format_bytes(steady.reserved_bytes)} reserved."
    if not has_allocator(outcome.setup):
        yield "No allocator was played (allocator: off): reserved bytes are taken as allocated ones."
    elif idle < LITTLE * steady.reserved_bytes:
        yield "Hardly anything is reserved that is not used at the peak: what has to fall is the peak."
    else:
        yield f"At least {format_bytes(idle)} of the reserved bytes are never used at once."
        if "expandable_segments:True" not in outcome.setup.allocator:
            yield "Expandable segments are off; try --knob allocator=expandable_segments:True."
    outside = outside_bytes(outcome.setup)
    yield f"Device use is {format_bytes(steady.device_bytes)}: {format_bytes(outside)} lie outside the allocator."


def _slower(outcome: Outcome) -> Iterator[str]:
    time = outcome.time
    if time is None:
        yield "The strategy does not get through a step: there is no time to compare with."
        return
    step = duration_with_range(time.step_ns * 1e-9, outcome.step_sigma)
    yield f"Simulated: {step} a step, of which the GPU waits"
    yield f"  {format_duration(time.host_bound_ns)} for the host,"
    yield f"  {format_duration(time.exposed_communication_ns)} for communication."
    calls = sum(1 for _, action, _ in outcome.memory.driver_calls if action == "flush")
    if calls:
        yield f"The allocator gives its cache back {calls} times: memory is so tight that every step pays for it."
    label = evidence(outcome.setup)["time"]
    yield f"Times are {label.label}: {label.source}."


def _comparable(outcome: Outcome) -> Iterator[str]:
    tokens, batch = tokens_per_step(outcome.setup), outcome.setup.batch
    if tokens is None:
        yield "A chain has no tokens and no loss: only step times and bytes compare."
        return
    yield (
        f"One step of this strategy sees {tokens:,} tokens: micro-batches of {batch.micro_batch} sequences of "
        f"{batch.tokens_per_sequence:,} tokens, {batch.accumulation} per step, on {outcome.setup.data_parallel} data-parallel "
        "ranks."
    )
    precision = outcome.setup.precision
    yield f"Parameters in {precision.parameters}, compute in {precision.compute}, reduction in {precision.reduce}."


SYMPTOMS: dict[str, tuple[str, Callable[[Outcome], Iterator[str]]]] = {
    "same-output-other-gradients": ("outputs agree, gradients do not", _gradients),
    "forward-shrank-backward-oom": ("less is kept after forward, yet backward runs out of memory", _backward),
    "reserved-does-not-fall": ("allocated fell, reserved did not", _reserved),
    "slower-than-predicted": ("the real step takes much longer", _slower),
    "losses-not-comparable": ("two strategies' losses or speeds disagree", _comparable),
}


def list_symptoms(console: Console) -> None:
    """Names and what they say."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, (says, _) in SYMPTOMS.items():
        table.add_row(Text(name, style="bold"), says)
    console.print(table)


def show_symptom(console: Console, played: Played, name: str) -> None:
    """What the strategy says about a complaint, then its guide. Raises RunError for an unknown one."""
    if name not in SYMPTOMS:
        near = nearest_name(name, SYMPTOMS)
        hint = f" (did you mean {near}?)" if near else ""
        raise RunError(f"--symptom {name}: one of {', '.join(SYMPTOMS)}{hint}")
    console.print(Text(f"{played.outcome.name}:", style="bold"))
    for line in SYMPTOMS[name][1](played.outcome):
        console.print(line)
    console.print("", Markdown(guide(name)))


def guide(name: str) -> str:
    """The page of a complaint, Markdown."""
    return files("sim.report").joinpath("guides", f"{name}.md").read_text(encoding="utf-8")
