"""Kernels of one pass of a compiled region: what Inductor's scheduler fuses, and in which order it runs.

Pointwise values live in registers unless something that does not fuse reads them, or they leave the region. Values of
equal extent fuse where one reads the other or both read the same.
"""

from __future__ import annotations

import heapq
from math import prod

from sim.program.kernels import ITEM_BYTES
from sim.runtime.compiled.buffers import Step, place_buffers
from sim.runtime.compiled.graph import Kind, Value, ancestors


def schedule(outputs: list[Value], given: set[Value], lent: set[Value]) -> list[Step]:
    """The launches that compute `outputs` where `given` are there; the bytes of those that are `lent` are not taken over."""
    given = {value.storage for value in given}
    storages = {value.storage for value in outputs}
    values = _by_need(ancestors(list(storages), given), given)
    steps = _ordered(_fused(values, given, storages), values)
    place_buffers(steps, given, storages, lent)
    return steps


def _by_need(values: list[Value], given: set[Value]) -> list[Value]:
    """In the order of the trace; but forward values that backward computes again come just before the first value of
    backward that needs them (reordering_to_mimic_autograd_engine)."""
    done: dict[Value, None] = {}
    for value in values:
        if not value.forward:
            done.update(dict.fromkeys(ancestors([value], given | done.keys())))
    return list(done) or values


class _Reads:
    """Which values in memory each value reads, through views and what stays in registers."""

    def __init__(self, values: list[Value], given: set[Value], storages: set[Value]) -> None:
        inside = set(values)
        self.in_memory = {
            v for v in values if v.kind is Kind.REDUCTION or not v.fused or v in storages or _feeds_extern(v, inside)
        } | given
        self._known: dict[Value, dict[Value, int]] = {}

    def of(self, value: Value) -> dict[Value, int]:
        """Elements read of each value in memory."""
        found = self._known.get(value)
        if found is None:
            found = {}
            for x in dict.fromkeys(value.inputs):
                for source, elements in self._through(x, _extent(x)).items():
                    found[source] = found.get(source, 0) + elements
            self._known[value] = found
        return found

    def _through(self, x: Value, elements: int) -> dict[Value, int]:
        storage = x.storage
        if storage in self.in_memory:
            return {storage: elements}
        return self.of(storage)


def _extent(x: Value) -> int:
    """Elements of memory that a view touches: repeated ones count once."""
    if x.strides is None:
        return x.elements
    return prod(n for n, stride in zip(x.shape, x.strides) if stride)


def _feeds_extern(value: Value, inside: set[Value]) -> bool:
    todo = [value]
    while todo:
        for user in todo.pop().users:
            if user.kind is Kind.EXTERN and user in inside:
                return True
            if user.kind is Kind.VIEW:
                todo.append(user)
    return False


def _fused(values: list[Value], given: set[Value], storages: set[Value]) -> list[Step]:
    """Steps whose members are all values in memory of a kernel, or an extern with its parts."""
    reads = _Reads(values, given, storages)
    home: dict[Value, Step] = {}
    steps: list[Step] = []
    for value in values:
        if value not in reads.in_memory or value.kind is Kind.VIEW:
            continue
        if value.kind is Kind.PART:
            step = home[value.inputs[0]]
            step.members.append(value)
        else:
            sources = reads.of(value)
            found = _partner(value, sources, steps, home) if value.fused else None
            step = found or Step([])
            if found is None:
                steps.append(step)
            step.members.append(value)
            step.reads |= set(sources)
            step.sources[value] = set(sources)
        home[value] = step
    for step in steps:
        _settle(step, steps, storages, reads)
    return steps


def _domain(value: Value) -> tuple[int, bool]:
    """Kernels loop over so many elements; sums over rows go another way."""
    return (value.inputs[0].elements if value.kind is Kind.REDUCTION else value.elements), value.column


def _partner(value: Value, sources: dict[Value, int], steps: list[Step], home: dict[Value, Step]) -> Step | None:
    """The kernel that a value joins: of equal extent (or the one that makes a row's statistic), with something in common,
    and from which no other step leads to the value."""
    best: tuple[int, int, Step] | None = None
    makers = {home[source] for source in sources if source in home}
    for number, step in enumerate(steps):
        if step.extern is not None:
            continue
        domains = {_domain(member) for member in step.members}
        largest = max(domains)
        fits = _domain(value) in domains or (step in makers and value.elements * 8 <= largest[0] and not value.column)
        if not fits or value.column != step.column:
            continue
        if any((source.whole or source.column) and home.get(source) is step for source in sources):
            continue
        shared = sum(source.bytes for source in sources if source in step.reads or source in step.members)
        others = makers - {step}
        if shared and not _leads(step, others, home) and (best is None or (shared, number) > best[:2]):
            best = (shared, number, step)
    return best[2] if best else None


def _leads(start: Step, ends: set[Step], home: dict[Value, Step]) -> bool:
    """Does any of `ends` need the results of `start`?"""
    todo, seen = list(ends), set(ends)
    while todo:
        for source in todo.pop().reads:
            step = home.get(source)
            if step is start:
                return True
            if step is not None and step not in seen:
                seen.add(step)
                todo.append(step)
    return False


def _settle(step: Step, steps: list[Step], storages: set[Value], reads: _Reads) -> None:
    """What a finished kernel writes and moves. Reductions that only their own kernel reads are never in memory."""
    if step.extern is not None:
        step.written = step.members[1:] or step.members
        return
    own = set(step.members)
    outside = {source for other in steps if other is not step for source in other.reads}
    step.written = [v for v in step.members if v in storages or v in outside]
    moved: dict[Value, int] = {}
    for member in step.members:
        for source, elements in reads.of(member).items():
            moved[source] = moved.get(source, 0) + elements
    step.reads -= own
    step.moved_bytes = sum(v.bytes for v in step.written) + sum(
        min(elements, source.elements) * ITEM_BYTES[source.dtype]
        for source, elements in moved.items()
        if source not in own
    )


def _ordered(steps: list[Step], values: list[Value]) -> list[Step]:
    """A kernel runs where the last of its members stood, once all that it reads is there."""
    place = {value: number for number, value in enumerate(values)}
    home = {value: step for step in steps for value in step.members}
    missing = {step: {home[r] for r in step.reads if r in home and home[r] is not step} for step in steps}
    needed_by: dict[Step, list[Step]] = {}
    for step, sources in missing.items():
        for source in sources:
            needed_by.setdefault(source, []).append(step)
    number = {step: max(place[value] for value in step.members) for step in steps}
    ready = [(number[step], id(step), step) for step in steps if not missing[step]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, _, step = heapq.heappop(ready)
        ordered.append(step)
        for user in needed_by.get(step, []):
            missing[user].discard(step)
            if not missing[user]:
                heapq.heappush(ready, (number[user], id(user), user))
    return ordered
