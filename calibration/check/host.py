"""What the framework spends apart from kernels, learnt from steps of networks that are not checked.

A step's time less its operators' is the framework's: of a plain step per operator; of a checkpointed one, besides that,
per region; of a selective one, besides both, per operator that the policy sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calibration.check.clock import typical
from calibration.check.plan import EVERY_LAYER, PLAIN, SELECTIVE
from calibration.check.predict import HostCosts, host_work, launches
from calibration.check.rounds import LOOP_KEY, Group


def learn(groups: Sequence[Group]) -> HostCosts:
    """From groups that have been measured; never below zero."""
    loop_us = typical(groups[0].kept.samples[LOOP_KEY]) / 1e3
    found = {"optimizer_loop": loop_us}
    for strategy, work in ((PLAIN, "operator"), (EVERY_LAYER, "checkpoint_region"), (SELECTIVE, "selective_policy")):
        left = sum(_left_us(group, strategy, found) for group in groups)
        count = sum(host_work(group.programs[strategy])[work] for group in groups)
        found[work] = max(left / count, 0.0)
    return HostCosts(**{f"{name}_us": value for name, value in found.items()})


def _left_us(group: Group, strategy: str, known: Mapping[str, float]) -> float:
    """Of a step, what neither its operators nor known costs explain."""
    program, times = group.programs[strategy], group.operator_ns()
    kernels_us = sum(count * times[work] for work, count in launches(program).items()) / 1e3
    host_us = sum(count * known.get(name, 0.0) for name, count in host_work(program).items())
    return typical(group.step_ns(strategy)) / 1e3 - kernels_us - host_us
