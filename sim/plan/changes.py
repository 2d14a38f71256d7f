"""Changes that people make to lower a peak, each played: what it saves, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sim.api import Outcome, simulate_setup
from sim.model.config import ModelConfig
from sim.scenario import Scenario, ScenarioError, load_text
from sim.scenario.dump import only_strategy
from sim.scenario.setup import Setup

LEAST_SAVING = 0.01  # of the peak


@dataclass(frozen=True, slots=True)
class Change:
    """Fields (dotted paths) and their new values; `says` is what that does, in words."""

    says: str
    fields: dict[str, Any]

    @property
    def text(self) -> str:
        """As one would type it: checkpoint={every: 1}."""
        return ", ".join(f"{path}={_yaml(value)}" for path, value in self.fields.items())


@dataclass(frozen=True, slots=True)
class Effect:
    """A change and the strategy played with it."""

    change: Change
    outcome: Outcome


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def candidates(setup: Setup) -> Iterator[Change]:
    """What could be tried on a set-up; whether a scenario can play it shows when it is loaded."""
    checkpoint, batch = setup.checkpoint, setup.batch
    if setup.mode == "eval":
        yield Change("no graph", {"mode": "no_grad"})
    if checkpoint is None or checkpoint.save or checkpoint.every > 1 or checkpoint.first or checkpoint.inside:
        yield Change("recompute every layer", {"checkpoint": {"every": 1}})
    if checkpoint is None:
        yield Change("recompute every second layer", {"checkpoint": {"every": 2}})
        yield Change(
            "keep attention and every second product, recompute the rest",
            {"checkpoint": {"save": ["attention", "every_second_matmul"]}},
        )
        yield Change("recompute attention alone", {"checkpoint": {"inside": ["core_attention"]}})
    if checkpoint is not None and checkpoint.segment > 1:
        yield Change("regions of one layer", {"checkpoint": {"every": 1}})
    if setup.offload is None:
        inputs = {"what": "checkpoint_inputs", "streams": "side"}
        yield Change("checkpoint inputs wait in host memory", {"offload": inputs})
        yield Change("activations wait in host memory", {"offload": {"what": "activations", "streams": "side"}})
    shared = setup.fsdp is not None or setup.family is not None or setup.pipeline is not None
    chunking = {"model.loss_chunking": "projection"} if shared else {}
    yield Change("the loss in 8 chunks", {"model.loss_chunks": 8} | chunking)
    if isinstance(setup.model, ModelConfig):
        kernels = sorted({*setup.model.liger, "fused_linear_cross_entropy"})
        yield Change("Liger's fused loss", {"model.liger": kernels})
    yield Change("the MLP in 8 tiles of tokens", {"model.mlp_tiles": 8})
    if batch.micro_batch > 1:
        half = {"batch.micro_batch": batch.micro_batch // 2, "batch.accumulation": batch.accumulation * 2}
        yield Change("half the micro-batch, twice as many", half)
    yield from _about_states(setup)


def _about_states(setup: Setup) -> Iterator[Change]:
    fsdp, optimizer = setup.fsdp, setup.optimizer
    if fsdp is not None and fsdp.reshard_after_forward not in (True, "torchtitan"):
        yield Change("blocks are resharded after forward", {"parallel.fsdp.reshard_after_forward": True})
    if fsdp is not None and not fsdp.cpu_offload:
        yield Change("parameters and optimizer live in host memory", {"parallel.fsdp.cpu_offload": True})
    if setup.zero is not None and setup.zero.offload_optimizer is None:
        yield Change("the optimizer lives in host memory", {"parallel.zero.offload_optimizer": "cpu"})
    if setup.data is not None and not setup.data.distributed_optimizer:
        yield Change("optimizer states are sharded", {"parallel.data.distributed_optimizer": True})
    if setup.tensor.degree > 1 and not setup.tensor.sequence_parallel:
        yield Change("sequence parallelism", {"parallel.tensor.sequence_parallel": True})
    if optimizer is not None and optimizer.variant == "foreach":
        yield Change("a fused optimizer makes no copies", {"optimizer.variant": "fused"})
    if optimizer is not None and not optimizer.in_backward:
        yield Change("steps inside backward", {"optimizer.in_backward": True, "optimizer.clip_norm": None})
    if optimizer is not None and optimizer.name == "adamw":
        yield Change("moments in 8 bit", {"optimizer": {"name": "adamw-8bit", "clip_norm": optimizer.clip_norm}})


def changed(scenario: Scenario, name: str, fields: dict[str, Any]) -> Setup:
    """The strategy with other values at dotted paths. Raises ScenarioError where no scenario can say that."""
    return load_text(only_strategy(scenario.text, name, fields), f"{name} with that change").strategies[0]


def play_changes(
    scenario: Scenario, outcome: Outcome, past: Callable[[int, int], None] = lambda done, total: None
) -> list[Effect]:
    """Every candidate that a scenario can say and that lowers the active peak by a hundredth, the best first.

    `past` is told after each how many of how many are played.
    """
    possible = []
    for change in candidates(outcome.setup):
        try:
            setup = changed(scenario, outcome.name, change.fields)
        except ScenarioError:
            continue
        if setup != outcome.setup:
            possible.append((change, setup))
    effects = []
    for done, (change, setup) in enumerate(possible, 1):
        effects.append(Effect(change, simulate_setup(setup)))
        past(done, len(possible))
    limit = (1 - LEAST_SAVING) * outcome.steady.active_bytes
    lower = [effect for effect in effects if effect.outcome.steady.active_bytes < limit]
    return sorted(lower, key=lambda effect: (effect.outcome.steady.active_bytes, step_ns(effect.outcome)))


def step_ns(outcome: Outcome) -> float:
    """Step time; infinite where the strategy does not get through a step."""
    return outcome.time.step_ns if outcome.time is not None else float("inf")
