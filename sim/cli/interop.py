"""The verbs `sim import` and `sim export`: other tools' configurations become scenarios, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.errors import answers_errors, stop
from sim.cli.only import chosen

PARTLY = 4
"""Exit code: a scenario is there, but it does not say everything that has an effect."""


def import_config(
    tool: Annotated[str, typer.Argument(help="megatron, deepspeed, accelerate, torchtitan or hf.")],
    file: Annotated[Path, typer.Argument(help="Launch script, JSON, YAML or TOML file.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="What it runs on, e.g. h100-sxm-80gb.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", min=1)] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1)] = None,
    model: Annotated[str | None, typer.Option("--model", help="A preset, or the path of a config.json.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens per sequence.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, help="Sequences per rank and forward pass.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="A field of the scenario; repeatable.")
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--var", metavar="NAME=VALUE", help="A variable of a script, or 1=VALUE for $1; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="YAML", help="Where the scenario goes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Make a scenario of a configuration of Megatron-LM, DeepSpeed, accelerate, torchtitan or Hugging Face.

    The scenario goes to stdout (or --out); what was used, assumed, ignored and not expressible is told beside it.

    Exit code: 0 the scenario says all that has an effect on time or memory, 4 it lacks something (said), 2 wrong input.

    Example: python -m sim import megatron run.sh --gpu h100-sxm-80gb --out scenario.yaml
    """
    with answers_errors():
        import json

        from sim.interop import TOOLS, Options, import_file, scenario_text, write_text
        from sim.report.errors import cannot_write
        from sim.report.imported import account_json, account_text
        from sim.scenario.problems import nearest_name

        if tool not in TOOLS:
            near = nearest_name(tool, TOOLS)
            stop(f"{tool}: one of {', '.join(TOOLS)}{f' (did you mean {near}?)' if near else ''}")
        known = dict(variable.partition("=")[::2] for variable in variables or ())
        options = Options(
            gpu=gpu, gpus_per_node=gpus_per_node, nodes=nodes, model=model, seq_len=seq_len, micro_batch=micro_batch,
            variables=known, changes=tuple(changes or ()),
        )  # fmt: skip
        imported = import_file(tool, file, options)
        text = scenario_text(imported, out.parent if out is not None else Path())
        if out is not None:
            try:
                write_text(out, text)
            except OSError as error:
                raise cannot_write(error, out) from None
        if as_json:
            print(json.dumps(account_json(imported, text), indent=2))
        elif out is None:
            print(text, end="")
            print(account_text(imported), file=sys.stderr)
        else:
            print(f"{account_text(imported)}\n\nScenario: {out}")
        raise typer.Exit(0 if imported.account.is_whole else PARTLY)


def export_config(
    tool: Annotated[str, typer.Argument(help="megatron.")],
    scenario: Annotated[Path, typer.Argument(help="A scenario file.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a field; repeatable.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="STRATEGY", help="The strategy (default: the first).")
    ] = None,
) -> None:
    """Print a strategy of a scenario as Megatron-LM's launch command.

    The command is imported again; what does not come back the same is told on stderr.

    Exit code: 0 the command says all of the scenario, 4 it lacks something (said), 2 wrong input.

    Example: python -m sim export megatron scenarios/megatron_tp.yaml --only sp
    """
    with answers_errors():
        from sim.api import load
        from sim.interop import export_megatron

        if tool != "megatron":
            stop(f"{tool}: only megatron can be exported to")
        setups = chosen(load(scenario, changes or ()).strategies, [only] if only else ())
        text, lost = export_megatron(setups[0], str(scenario))
        print(text, end="")
        if lost:
            print("Megatron's arguments do not say all of it:", *lost, sep="\n  ", file=sys.stderr)
        raise typer.Exit(PARTLY if lost else 0)
