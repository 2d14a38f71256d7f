"""Megatron's arguments out of what people keep them in: a launch script, a file of arguments, YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sim.interop.files import flat, read_yaml
from sim.interop.given import Raw
from sim.interop.shell import Script, Text, read_script
from sim.interop.table import Table
from sim.scenario.problems import Problem

SETTINGS = (".yaml", ".yml", ".json")
ARGUMENT = re.compile(r"--[A-Za-z][\w.-]*")
SLURM = ((("nodes", "N"), "nnodes"), (("gpus-per-node", "gres", "ntasks-per-node"), "nproc-per-node"))
"""Options of #SBATCH lines, the most telling first ("gres=gpu:8"), and what they mean."""
KEY_ARGUMENTS = ("num-layers", "hidden-size", "micro-batch-size", "tensor-model-parallel-size", "seq-length")


def read_arguments(
    path: Path, text: str, table: Table, variables: Mapping[str, str]
) -> tuple[list[Raw], list[Problem], list[int]]:
    """Arguments in order; what is wrong; lines of conditions that could not be followed."""
    if path.suffix in SETTINGS:
        return _settings(read_yaml(text, str(path)), table), [], []
    script = read_script(text, variables)
    commands = _training_commands(script, table)
    if not commands:
        message = "no training command is found: one that passes Megatron's arguments, e.g. --num-layers 24"
        return [], [Problem(file=str(path), message=message)], []
    if len(commands) > 1:
        lines = ", ".join(str(command[0].line) for command in commands)
        message = f"{len(commands)} training commands are found (lines {lines}): leave one"
        return [], [Problem(file=str(path), message=message)], []
    return [*_allocated(script), *_arguments(commands[0], table)], [], script.undecided


def _allocated(script: Script) -> Iterator[Raw]:
    """Nodes and GPUs of #SBATCH lines; what the launcher says later counts. Tasks are GPUs only where no GPUs are named."""
    for names, meant in SLURM:
        if (name := next((name for name in names if name in script.slurm), None)) is not None:
            value = script.slurm[name]
            yield Raw(meant, value.text.rpartition(":")[2], value.line)


def _training_commands(script: Script, table: Table) -> list[list[Text]]:
    """Commands that pass arguments only Megatron's scripts have. A file of arguments alone is one command."""
    found = []
    loose: list[Text] = []
    for command in script.commands:
        names = {word.text[2:].partition("=")[0].replace("_", "-") for word in command if ARGUMENT.match(word.text)}
        if command[0].text.startswith("--"):
            loose += command
        elif names & set(KEY_ARGUMENTS) and any(word.text.endswith(".py") or word.text == "-m" for word in command):
            found.append(command)
    return [*found, *([loose] if loose and not found else [])]


def _arguments(command: list[Text], table: Table) -> Iterator[Raw]:
    """Names with their values: as many words as the table says, or as follow where a name is not known."""
    at = 0
    while at < len(command):
        match = ARGUMENT.match(command[at].text)
        if match is None:
            at += 1
            continue
        name, equals, value = command[at].text[2:].partition("=")
        line = command[at].line
        at += 1
        name = _known_name(name, table)
        field = table.find(name)
        if equals:
            yield Raw(name, value, line)
        elif field is not None and field.takes in ("flag",):
            yield Raw(name, None, line)
        elif field is not None and field.takes != "list":
            yield Raw(name, command[at].text if at < len(command) else None, line)
            at += 1
        else:
            values = []
            while at < len(command) and not ARGUMENT.match(command[at].text):
                values.append(command[at].text)
                at += 1
            yield Raw(name, values if field is not None else " ".join(values) or None, line)


def _known_name(name: str, table: Table) -> str:
    """The spelling of the table: torchrun and Megatron take dashes, some scripts write underscores."""
    for spelling in (name, name.replace("_", "-"), name.replace("-", "_")):
        if table.find(spelling) is not None:
            return spelling
    return name


def _settings(data: Mapping[str, Any], table: Table) -> list[Raw]:
    """Files of settings: sections are only for order, names have underscores or dashes, flags are true or false."""
    opposite = {field.dest: field.name for field in table.fields.values() if field.dest}
    raws = []
    for path, value, line in flat(data):
        name = _known_name(path[-1].lstrip("-"), table)
        dashed = name.replace("_", "-")
        if table.find(name) is None and dashed in opposite:
            name, value = opposite[dashed], not value if isinstance(value, bool) else value
        if value is None:
            continue
        if table.find(name) is None and len(path) > 1 and path[0] in SECTIONS_WITHOUT_EFFECT:
            continue
        raws.append(Raw(name, value, line))
    return raws


SECTIONS_WITHOUT_EFFECT = ("exp_manager", "data", "dataset", "logger", "checkpoint", "rng", "rerun_state_machine", "dist",
                           "profiling", "straggler", "tokenizer", "scheduler", "ENV_VARS", "run", "recipe")  # fmt: skip
"""Sections of NeMo's and Megatron-Bridge's files whose unknown keys are about data, logs and weights' files."""
