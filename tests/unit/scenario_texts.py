"""A valid scenario to spoil, and what the border says of it."""

import pytest

from sim.scenario import ScenarioError, load_text
from sim.scenario.setup import Setup

VALID = """\
model:      {preset: llama-tiny, implementation: torchtitan}
cluster:    {gpu: h100-sxm-80gb, gpus_per_node: 8}
batch:      {micro_batch: 1, seq_len: 512}
parallel:   {fsdp: {degree: 8}}
strategies:
  none: {}
  full: {checkpoint: {every: 1}}
"""


def problems(text: str, overrides: tuple[str, ...] = ()) -> list[tuple[int | None, str, str]]:
    """(line, path, text) of everything wrong with a scenario."""
    with pytest.raises(ScenarioError) as caught:
        load_text(text, "mine.yaml", overrides)
    return [(problem.line, problem.path, problem.text) for problem in caught.value.problems]


def changed(old: str, new: str) -> list[tuple[int | None, str, str]]:
    """What is wrong with the valid scenario after a change."""
    assert old in VALID
    return problems(VALID.replace(old, new))


def only(text: str = VALID, overrides: tuple[str, ...] = ()) -> Setup:
    """The single strategy of a scenario, or the first."""
    return load_text(text, "mine.yaml", overrides).strategies[0]
