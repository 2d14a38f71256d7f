"""Which forward values a compiled region saves: PyTorch's min_cut_rematerialization_partition.

The cheapest cut between what cannot be computed again and what backward needs; heuristics, weights and the choice among
equal cuts are those of torch/_functorch/partitioners.py (2.13 and 2.14, activation_memory_budget 1).
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

from sim.runtime.compiled.graph import Kind, Value, Wish, ancestors

INFINITE = 1 << 100
FAR = 10**9
SOURCE, SINK = 0, 1


class _Facts(NamedTuple):
    """`forward` and `backward`: values that forward must, and that only backward can compute; `distance` to backward."""

    forward: set[Value]
    backward: set[Value]
    distance: dict[Value, int]
    order: dict[Value, int]


def saved_values(values: list[Value], output: Value, gradients: list[Value], tangent: Value) -> list[Value]:
    """Values, inputs among them, that forward hands to backward, in the order of the trace; views stand for what they
    are views of."""
    needed = set(ancestors([output, *gradients], set()))
    values = [value for value in values if value in needed]
    facts = _facts(values, needed, output, tangent)
    banned = {v for v in values if v in facts.forward and _is_banned(v, needed, facts)}
    _ban_far_uses(facts, needed, banned)
    network = _Network(2 * len(values) + 2)
    place = {value: 2 + 2 * number for number, value in enumerate(values)}
    for value in values:
        entry, end = place[value], place[value] + 1
        if value in facts.backward or (value.wish is Wish.RECOMPUTE):
            network.connect(entry, SINK, INFINITE)
            continue
        if value in banned:
            network.connect(SOURCE, entry, INFINITE)
        network.connect(entry, end, _weight(value, needed, facts) if value.forward else INFINITE)
        for user in value.users:
            if user in place:
                network.connect(end, place[user], INFINITE)
    behind = network.behind_the_cut()
    cut = [v for v in values if place[v] not in behind and place[v] + 1 in behind]
    kept = {value.storage for value in cut}
    read = {x.storage for value in ancestors(gradients, kept) for x in value.inputs}
    return sorted(kept & read, key=lambda value: value.number)


def _facts(values: list[Value], needed: set[Value], output: Value, tangent: Value) -> _Facts:
    forward = set(ancestors([output], set()))
    backward = {tangent}
    for value in values:
        if any(x in backward for x in value.inputs):
            backward.add(value)
    distance: dict[Value, int] = {}
    for value in reversed(values):
        steps = [distance[user] + 1 for user in value.users if user in needed]
        distance[value] = 0 if value not in forward else min([*steps, FAR])
    ordered = [value for value in values if value in forward]
    return _Facts(forward, backward, distance, {value: number for number, value in enumerate(ordered)})


def _fusible(value: Value) -> bool:
    return (value.fused and value.recomputable) or value.kind in (Kind.VIEW, Kind.PART)


def _fuses(value: Value, user: Value) -> bool:
    """Could the user read the value without its being in memory?"""
    return user.aten == "aten.cat" or (_fusible(value) and _fusible(user))


def _is_banned(value: Value, needed: set[Value], facts: _Facts) -> bool:
    """Must it not be computed again? Views always may."""
    if value.kind is Kind.VIEW or value.wish is Wish.RECOMPUTE:
        return False
    if value.kind is Kind.INPUT or value.wish is Wish.SAVE:
        return True
    if value.kind is Kind.PART:
        return False
    if value.kind is Kind.EXTERN or not value.recomputable or value.random:
        return True
    if _in_memory_in_backward(value, needed, facts):
        return True
    return 4 * value.bytes < sum(x.bytes for x in dict.fromkeys(value.inputs))


def _in_memory_in_backward(value: Value, needed: set[Value], facts: _Facts) -> bool:
    """Is it read there, perhaps through views, by what does not fuse?"""
    todo = [value]
    while todo:
        current = todo.pop()
        for user in current.users:
            if user not in needed:
                continue
            if user not in facts.forward and not _fuses(current, user):
                return True
            if user.kind is Kind.VIEW:
                todo.append(user)
    return False


def _weight(value: Value, needed: set[Value], facts: _Facts) -> int:
    """Bytes, dearer the farther backward is; twice that where saving makes a value that would never be in memory."""
    if value.parameter:
        return 0
    if value.kind is Kind.EXTERN and any(user.kind is Kind.PART for user in value.users):
        return INFINITE
    weight = int(value.bytes * 1.1 ** max(min(facts.distance[value], 100), 1))
    fuses = value.kind is not Kind.INPUT and all(_fuses(value, user) for user in value.users if user in needed)
    return 2 * weight if fuses else weight


def _ban_far_uses(facts: _Facts, needed: set[Value], banned: set[Value]) -> None:
    """Of a value's fusible users, those behind the first one that does not fuse are not computed again."""
    for value in facts.order:
        users = [user for user in value.users if user in facts.order]
        if not users:
            continue
        limit = _first_unfusible(users, max(facts.order[user] for user in users), facts)
        for user in users:
            far = facts.order[user] > limit and _fuses(value, user)
            if far and user.kind is not Kind.VIEW and user.wish is not Wish.RECOMPUTE:
                banned.add(user)


def _first_unfusible(users: list[Value], last: int, facts: _Facts) -> int:
    heap = [(facts.order[user], id(user), user, True) for user in users]
    heapq.heapify(heap)
    seen: set[tuple[int, bool]] = set()
    while heap:
        order, _, value, fuses = heapq.heappop(heap)
        if not fuses:
            return order
        for user in value.users:
            entry = (facts.order.get(user, last + 1), _fuses(value, user))
            if entry[0] <= last and entry not in seen:
                seen.add(entry)
                heapq.heappush(heap, (entry[0], id(user), user, entry[1]))
    return last


class _Network:
    """A flow network: Dinic's algorithm; of all cheapest cuts the one nearest to the sink."""

    def __init__(self, places: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(places)]
        self._to: list[int] = []
        self._room: list[int] = []

    def connect(self, a: int, b: int, capacity: int) -> None:
        for start, end, room in ((a, b, capacity), (b, a, 0)):
            self._edges[start].append(len(self._to))
            self._to.append(end)
            self._room.append(room)

    def behind_the_cut(self) -> set[int]:
        """Places from which the sink can still be reached when no more can flow."""
        while self._augment():
            pass
        reached, todo = {SINK}, [SINK]
        while todo:
            for edge in self._edges[todo.pop()]:
                start = self._to[edge]
                if start not in reached and self._room[edge ^ 1] > 0:
                    reached.add(start)
                    todo.append(start)
        return reached

    def _augment(self) -> bool:
        """Send flow along one shortest path; False where there is none."""
        came: dict[int, int] = {SOURCE: -1}
        queue = deque([SOURCE])
        while queue and SINK not in came:
            start = queue.popleft()
            for edge in self._edges[start]:
                if self._room[edge] > 0 and self._to[edge] not in came:
                    came[self._to[edge]] = edge
                    queue.append(self._to[edge])
        if SINK not in came:
            return False
        path, place = [], SINK
        while place != SOURCE:
            path.append(came[place])
            place = self._to[came[place] ^ 1]
        flow = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= flow
            self._room[edge ^ 1] += flow
        return True
