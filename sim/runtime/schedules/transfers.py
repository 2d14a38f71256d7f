"""Sends and receives between the actions of a schedule, in an order in which nobody waits for ever.

As torch.distributed.pipelining posts them. GPipe and 1F1B receive right before they compute. Schedules of several
chunks receive as soon as the sender, by the order of actions alone, has sent: receives stand in the sender's order, and
transfers overlap computation.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.runtime.schedules.actions import Action, Kind, Part


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a rank does: compute, or move what `action` made: send it, or receive it from there.

    `receives` and `sends` are None for computing; else the rank on the other side.
    """

    action: Action
    receives: int | None = None
    sends: int | None = None

    @property
    def computes(self) -> bool:
        return self.receives is None and self.sends is None


def with_transfers(orders: list[list[Action]], parts: list[Part], early: bool) -> list[list[Step]]:
    """Every rank's steps; `early`: receive as soon as possible. Raises ValueError for orders that cannot be run."""
    steps: list[list[Step]] = [[] for _ in orders]
    made: set[Action] = set()
    pending = [list(reversed(order)) for order in orders]
    while any(pending):
        moved = False
        for rank, rest in enumerate(pending):
            if not rest:
                continue
            action, needs = rest[-1], needed(rest[-1], len(parts))
            own = action._replace(kind=Kind.FORWARD) if action.passes_back else None
            if any(other is not None and other not in made for other in (needs, own)):
                continue
            rest.pop()
            moved = True
            if needs is not None and not early and (source := parts[needs.stage].rank) != rank:
                steps[rank].append(Step(needs, receives=source))
            steps[rank].append(Step(action))
            result = _result(action)
            made.add(result)
            to = receiver(result, parts)
            if to is not None and to != rank:
                steps[rank].append(Step(result, sends=to))
                if early:
                    steps[to].append(Step(result, receives=rank))
        if not moved:
            stuck = ", ".join(f"rank {rank} at {rest[-1]}" for rank, rest in enumerate(pending) if rest)
            raise ValueError(f"the orders wait for each other: {stuck}")
    return steps


def needed(action: Action, stages: int) -> Action | None:
    """What an action needs from another stage: a forward the forward before it, a backward that of the stage after.

    A split backward is known by its BACKWARD here, since it is the input's gradient that moves.
    """
    if action.kind is Kind.FORWARD and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.passes_back and action.stage < stages - 1:
        return Action(action.stage + 1, Kind.BACKWARD, action.micro_batch)
    return None


def receiver(action: Action, parts: list[Part]) -> int | None:
    """The rank that waits for the result of an action."""
    stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    return parts[stage].rank if action.kind is not Kind.WEIGHT_GRADIENT and 0 <= stage < len(parts) else None


def _result(action: Action) -> Action:
    return action._replace(kind=Kind.BACKWARD) if action.kind is Kind.INPUT_GRADIENT else action
