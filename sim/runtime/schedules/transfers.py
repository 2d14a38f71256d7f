"""Sends and receives between the actions of a schedule, in an order in which nobody waits for ever.

As torch.distributed.pipelining posts them. GPipe and 1F1B receive right before they compute. Schedules of several
chunks receive as soon as the sender, by the order of actions alone, has sent: receives stand in the sender's order, and
transfers overlap computation. Megatron's interleaved schedule without overlap (`slots`) goes in steps of a forward, a
backward, or in the steady state one of each: it receives what both need, computes both, and sends both results.
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


def with_transfers(orders: list[list[Action]], parts: list[Part], early: bool, slots: bool = False) -> list[list[Step]]:
    """Every rank's steps; `early`: receive as soon as possible; `slots`: compute a forward and the backward after it with
    nothing between. Raises ValueError for orders that cannot be run."""
    steps: list[list[Step]] = [[] for _ in orders]
    made: set[Action] = set()
    pending = [list(reversed(_slots(order) if slots else [(action,) for action in order])) for order in orders]
    while any(pending):
        moved = False
        for rank, rest in enumerate(pending):
            if not rest:
                continue
            needs = [other for action in rest[-1] if (other := needed(action, len(parts))) is not None]
            own = [action._replace(kind=Kind.FORWARD) for action in rest[-1] if action.passes_back]
            if any(other not in made and other not in rest[-1] for other in (*needs, *own)):
                continue
            slot = rest.pop()
            moved = True
            for other in needs:
                if not early and (source := parts[other.stage].rank) != rank:
                    steps[rank].append(Step(other, receives=source))
            steps[rank] += [Step(action) for action in slot]
            for result in map(_result, slot):
                made.add(result)
                to = receiver(result, parts)
                if to is not None and to != rank:
                    steps[rank].append(Step(result, sends=to))
                    if early:
                        steps[to].append(Step(result, receives=rank))
        if not moved:
            stuck = ", ".join(f"rank {rank} at {rest[-1][0]}" for rank, rest in enumerate(pending) if rest)
            raise ValueError(f"the orders wait for each other: {stuck}")
    return steps


def _slots(order: list[Action]) -> list[tuple[Action, ...]]:
    """The order with every forward of the steady state (which begins with the first forward that a backward follows, where
    forwards come after that) beside the backward after it."""
    kinds = [action.kind for action in order]
    steady = Kind.FORWARD in kinds[kinds.index(Kind.BACKWARD) :]
    slots: list[tuple[Action, ...]] = []
    for action in order:
        follows = bool(slots) and slots[-1][-1].kind is Kind.FORWARD and action.kind is Kind.BACKWARD
        if steady and follows:
            slots[-1] = (*slots[-1], action)
        else:
            slots.append((action,))
    return slots


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
