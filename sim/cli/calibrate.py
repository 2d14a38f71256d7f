"""The verb `calibrate`: a cost profile of the user's own device. What it runs is in the package `calibration`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.errors import INTERRUPTED, answers_errors, stop

DEVICES = ("cuda", "cpu")


def calibrate(
    device: Annotated[str | None, typer.Option("--device", help="cuda or cpu.")] = None,
    scenario: Annotated[
        Path | None, typer.Option("--scenario", help="Measure this scenario's shapes first, exactly.")
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Time to take at most.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="NAME.yaml", help="The profile (default: named by the device).")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads of a CPU (0: as torch does).")] = 0,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="FAMILY", help="Measure this family; repeatable.")
    ] = None,
    from_trace: Annotated[
        Path | None, typer.Option("--from-trace", metavar="TRACE", help="Take times from a profiler's trace instead.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Predict training steps, run them for real, compare; writes no profile.")
    ] = False,
    short: Annotated[bool, typer.Option("--short", help="Of the check: small networks, few rounds.")] = False,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FILE", help="Of the check: its rounds; it goes on there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Of the check: print one JSON object.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Of the check: exit with 1 where a time misses.")] = False,
) -> None:
    """Measure this machine and write a cost profile of its own (docs/calibration.md). Needs torch.

    Points are kept beside the profile; the same command goes on where it was stopped. Exit code of --check: 0 the peaks
    in bytes are equal, 1 they are not.

    Example: python -m sim calibrate --device cuda --scenario scenarios/fsdp_ckpt.yaml --out mine.yaml
    """
    with answers_errors():
        problems = _problems(device, minutes, out, only, from_trace, scenario)
        of_check = {"--short": short, "--keep": keep is not None, "--json": as_json, "--strict": strict}
        not_of_check = {"--out": out is not None, "--only": bool(only), "--from-trace": from_trace is not None}
        problems += [f"{name}: not with --check" for name, given in not_of_check.items() if check and given]
        problems += [f"{name}: only with --check" for name, given in of_check.items() if given and not check]
        if problems:
            stop("\n".join(problems))
        if check:
            command = import_module("calibration.check.command")
            raise typer.Exit(command.check(device, scenario, minutes, threads, short, keep, as_json, strict))
        verb = import_module("calibration.own.calibrate")
        failure = import_module("calibration.measure.words").CalibrationError
        try:
            if from_trace is not None:
                print(verb.calibrate_from_trace(from_trace, out))
                return
            text, interrupted = verb.calibrate(device, minutes, scenario, out, threads, only or ())
        except failure as error:
            stop(str(error))
        if text:  # of several ranks the first one tells
            print(text)
        code = INTERRUPTED if interrupted else 0
        verb.end(code)
        raise typer.Exit(code)


def _problems(
    device: str | None,
    minutes: float,
    out: Path | None,
    only: list[str] | None,
    from_trace: Path | None,
    scenario: Path | None,
) -> list[str]:
    """Everything wrong with the arguments."""
    found = []
    if from_trace is None and device not in DEVICES:
        found.append(f"--device {device or ''}: one of {', '.join(DEVICES)}".replace(" :", ":"))
    if from_trace is not None:
        given = {"--device": device, "--scenario": scenario, "--only": only or None}
        found += [
            f"{name}: nothing is measured with --from-trace" for name, value in given.items() if value is not None
        ]
    if not 0 < minutes < 24 * 60:
        found.append(f"--minutes {minutes:g}: a number above 0 is expected, e.g. 5")
    if out is not None and out.suffix not in (".yaml", ".yml"):
        found.append(f"--out {out}: a file that ends in .yaml is expected, as scenarios name it")
    if out is not None and not out.parent.is_dir():
        found.append(f"--out {out}: no such directory: {out.parent}")
    if only:
        families = import_module("calibration.measure.words").FAMILIES
        found += [f"--only {name}: one of {', '.join(families)}" for name in only if name not in families]
    return found
