"""Play the scenario of one published row and set it beside what the row measured. One row never stops another."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal

from sim.api import Outcome, has_allocator, shown_lanes, simulate_setup
from sim.checks import measured
from sim.checks.expressible import NotExpressible
from sim.checks.facts import Facts, facts_of
from sim.checks.rows import Plan, plan_of
from sim.checks.software import Counter
from sim.model.config import ModelConfig
from sim.scenario import ScenarioError, load_text
from sim.scenario.allocator.settings import ALLOCATOR_OFF
from sim.scenario.setup import Setup
from sim.timeline.metrics import step_time

GIB = 2**30
AGAIN_S = 0.05
MANY_PASSES = 20_000
"""Layers times micro-batches from which on a pipeline's bytes are counted without an allocator: GPT-3 175B with 64
micro-batches has 6,144, the largest published runs 30,000 to 200,000."""
Status = Literal["scored", "not expressible", "failed"]

PREDICTED = (
    "predicted_step_time_s", "predicted_tokens_per_s_per_gpu", "predicted_peak_allocated_gib",
    "predicted_peak_active_gib", "predicted_peak_reserved_gib", "predicted_device_gib", "time_error", "memory_error",
)  # fmt: skip
RESULTS = (*PREDICTED, "status", "reason")
"""Columns that scoring adds to a table. Errors are predicted / published - 1."""


@dataclass(frozen=True, slots=True)
class Score:
    """What is added to a row: `figures` by column of `PREDICTED`, None where there is none."""

    figures: Mapping[str, float | None]
    status: Status
    reason: str

    def cells(self) -> dict[str, str]:
        """As written into the table, six digits."""
        numbers = {name: "" if (value := self.figures.get(name)) is None else f"{value:.6g}" for name in PREDICTED}
        return numbers | {"status": self.status, "reason": self.reason}


def score_row(row: Mapping[str, str], limit_s: float | None = None) -> Score:
    """The score of a row. Never raises: what goes wrong is the status and the reason. `limit_s`: time for one row."""
    try:
        with _within(limit_s):
            plan = plan_of(facts_of(row))
            return _score(plan)
    except NotExpressible as error:
        return Score({}, "not expressible", str(error))
    except ScenarioError as error:
        problems = "; ".join(f"{problem.path} {problem.text}" for problem in error.problems)
        return Score({}, "not expressible", problems)
    except _TooLong:
        return Score({}, "failed", f"took longer than {limit_s:g} s")
    except MemoryError:
        return Score({}, "failed", "out of memory while simulating")
    except Exception as error:
        return Score({}, "failed", f"{type(error).__name__}: {error}".replace("\n", " "))


def _score(plan: Plan) -> Score:
    facts, tokens = plan.facts, plan.tokens_per_step
    scenario = load_text(json.dumps(plan.document), facts.text.get("model_name") or "row")
    setup = scenario.strategies[0]
    if setup.pipeline is not None and setup.model.layers * setup.batch.accumulation > MANY_PASSES:
        setup = replace(setup, allocator=ALLOCATOR_OFF)
    outcome = _largest_that_fits(setup) if plan.chooses_micro_batch else None
    outcome = outcome or simulate_setup(setup)
    setup = outcome.setup
    step_s = _step_s(outcome)
    assert facts.num_gpus is not None
    memory = _memory_gib(outcome, facts, plan.software.since_start)
    published_s = measured.step_s(facts, tokens, setup.model if isinstance(setup.model, ModelConfig) else None)
    kind = measured.counter(facts, plan.software)
    figures = {
        "predicted_step_time_s": step_s,
        "predicted_tokens_per_s_per_gpu": tokens / facts.num_gpus / step_s,
        "predicted_peak_allocated_gib": memory["allocated"],
        "predicted_peak_active_gib": memory["active"],
        "predicted_peak_reserved_gib": memory["reserved"],
        "predicted_device_gib": memory["device"],
        "time_error": step_s / published_s - 1 if published_s else None,
        "memory_error": memory[kind] / facts.peak_mem_gib - 1 if facts.peak_mem_gib else None,
    }
    remarks = _remarks(plan, outcome, published_s, kind)
    if facts.says("recompute", "doubtful") and published_s:
        other = load_text(json.dumps(plan.doubted()), scenario.name).strategies[0]
        other_s = _step_s(simulate_setup(replace(other, batch=setup.batch, allocator=setup.allocator)))
        how = "with full" if setup.checkpoint is None else "without"
        remarks.insert(0, f"{how} recomputation {other_s:.6g} s, error {other_s / published_s - 1:+.3f}")
    return Score(figures, "scored", "; ".join(remarks))


def _largest_that_fits(setup: Setup) -> Outcome | None:
    """The run with as many of the step's sequences in a micro-batch as fit, of the powers of two that divide them."""
    total = setup.batch.micro_batch * setup.batch.accumulation
    sizes = [1 << power for power in range(total.bit_length()) if total % (1 << power) == 0]
    for size in reversed(sizes):
        batch = replace(setup.batch, micro_batch=size, accumulation=total // size)
        outcome = simulate_setup(replace(setup, batch=batch))
        if outcome.fits:
            return outcome
    return None


def _step_s(outcome: Outcome) -> float:
    """The steady step; of a run that does not fit, what it would take with memory without end."""
    if outcome.time is not None:
        return outcome.time.step_ns * 1e-9
    return max(step_time(lanes).step_ns for lanes in shown_lanes(outcome)) * 1e-9


def _memory_gib(outcome: Outcome, facts: Facts, since_start: bool) -> dict[Counter, float]:
    """The four counters' peaks of the steady step, or of the whole run, on the ranks that the source speaks of."""
    ranks = [outcome.ranks[index] for index in measured.ranks(facts, len(outcome.ranks))]
    steps = [step for rank in ranks for step in ([rank.steady, rank.first_step] if since_start else [rank.steady])]
    return {
        "allocated": max(step.allocated_bytes for step in steps) / GIB,
        "active": max(step.active_bytes for step in steps) / GIB,
        "reserved": max(step.reserved_bytes for step in steps) / GIB,
        "device": max(step.device_bytes for step in steps) / GIB,
    }


def _remarks(plan: Plan, outcome: Outcome, published_s: float | None, kind: str) -> list[str]:
    remarks = []
    if not has_allocator(outcome.setup):
        remarks.append("bytes without an allocator: reserved taken as allocated")
    if not outcome.fits:
        usable = outcome.setup.cluster.usable_memory_bytes / GIB
        remarks.append(f"does not fit {usable:.1f} GiB when simulated: time as with more memory")
    if plan.chooses_micro_batch:
        remarks.append(f"micro-batch {outcome.setup.batch.micro_batch}, the largest power of two that fits")
    if plan.facts.peak_mem_gib:
        remarks.append(f"memory compared: {kind}")
    if published_s is None and not plan.facts.peak_mem_gib:
        remarks.append("nothing printed to compare with")
    return remarks + list(plan.assumptions)


class _TooLong(BaseException):
    """The time for one row is over. No Exception, so that no handler on the way takes it for its own."""


@contextmanager
def _within(limit_s: float | None) -> Iterator[None]:
    """Raises _TooLong after `limit_s`, where the platform has timers and this is the main thread.

    Python drops what is raised while an object is taken down, so the timer goes on until it is heard.
    """
    can_time = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if limit_s is None or not can_time:
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TooLong

    def unheard(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, _TooLong):
            hook(dropped)

    before, hook = signal.signal(signal.SIGALRM, stop), sys.unraisablehook
    sys.unraisablehook = unheard
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
