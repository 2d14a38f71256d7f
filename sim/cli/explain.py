"""The verb `sim explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.errors import answers_errors

if TYPE_CHECKING:
    from rich.console import Console

    from sim.report.explain import Played
    from sim.scenario.setup import Scenario, Setup


def explain(
    run: Annotated[Path, typer.Argument(help="A run's folder, one strategy's folder in it, or a scenario file.")],
    at: Annotated[
        str | None, typer.Option("--at", metavar="peak|MARK", help="A moment of the step: peak, forward, backward, ...")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", help="A moment: so long after the step's start, e.g. 812ms.")
    ] = None,
    module: Annotated[str | None, typer.Option("--module", help="What a module makes, e.g. layers.7.")] = None,
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="Life of one storage by number, or of all that a module makes.")
    ] = None,
    knob: Annotated[
        list[str] | None, typer.Option("--knob", metavar="PATH=VALUE", help="Does this setting help, and if not, why?")
    ] = None,
    symptom: Annotated[
        str | None, typer.Option("--symptom", metavar="NAME", help="A usual complaint; `list` names them.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="STRATEGY", help="Of a run's folder; repeatable.")
    ] = None,
) -> None:
    """Say why memory is what it is: who is alive at a moment and until when, and what would lower the peak.

    The strategy is played again from the scenario that its run has left. Without options: the peak, and the changes
    that lower it most, each played.

    Example: python -m sim explain out/fsdp_ckpt/none --at peak
    """
    with answers_errors():
        from sim.report.console import make_console
        from sim.report.explain import Played, show_module, show_tensor
        from sim.report.progress import Progress
        from sim.report.rerun import chosen_setups
        from sim.report.symptoms import list_symptoms, show_symptom

        console = make_console()
        if symptom == "list":
            list_symptoms(console)
            return
        scenario, setups = chosen_setups(run, only or [])
        from sim.api import simulate_setup

        for setup in setups:
            with Progress(1, f"playing {setup.name}"):
                played = Played.of(simulate_setup(setup))
            if symptom is not None:
                show_symptom(console, played, symptom)
            if knob:
                _knob(console, scenario, setup, played, knob)
            if module is not None:
                show_module(console, played, module)
            if tensor is not None:
                show_tensor(console, played, tensor)
            if at is not None or time is not None or not any((symptom, knob, module, tensor)):
                _moment(console, scenario, played, at, time)


def _moment(console: Console, scenario: Scenario, played: Played, at: str | None, time: str | None) -> None:
    from sim.plan.changes import play_changes
    from sim.report.explain import show_effects, show_moment
    from sim.report.progress import Progress
    from sim.units import parse_duration

    if time is not None:
        show_moment(console, played, played.event_at(parse_duration(time)), f"at {time}")
    if at is not None and at != "peak":
        show_moment(console, played, played.mark(at), f"after {at}")
    if at == "peak" or (at is None and time is None):
        show_moment(console, played, played.outcome.peak.event, "at the peak")
        with Progress(0, "playing changes") as progress:
            tried = []

            def past(done: int, total: int) -> None:
                progress.total = total
                tried.append(progress.past(done))

            effects = play_changes(scenario, played.outcome, past)
        show_effects(console, played.outcome, effects, len(tried))


def _knob(console: Console, scenario: Scenario, setup: Setup, played: Played, knobs: list[str]) -> None:
    from sim.api import simulate_setup
    from sim.report.knob import show_knob
    from sim.scenario import load_text
    from sim.scenario.dump import only_strategy

    changed = load_text(only_strategy(scenario.text, setup.name, {}), f"{setup.name} with --knob", knobs).strategies[0]
    show_knob(console, ", ".join(knobs), played.outcome, simulate_setup(changed))
