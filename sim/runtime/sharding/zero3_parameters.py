"""ZeRO-3's parameters: which are gathered when, which are dropped when (DeepSpeed's PartitionedParameterCoordinator).

A module's parameters are gathered as it begins, forward and backward, and dropped as it ends. From the second pass on
the order of modules is known: parameters that come next are gathered ahead, and those that come again soon are kept.
Source: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py and partition_parameters.py, read there.
"""

from __future__ import annotations

from collections import deque

from sim.model.module import Module, Parameter
from sim.program.kernels import ITEM_BYTES, Collective, HostCopy
from sim.program.program import ALL_GATHER, COMPUTE, Owner
from sim.runtime.recorder import Operators
from sim.runtime.scratch import ceil_div
from sim.runtime.sharding.zero_drive import PartDrive
from sim.runtime.tape import Tape
from sim.runtime.tensor import Storage, Tensor
from sim.scenario.parallel import Zero

MOST_FETCHES = 2
"""Gathers that may be unfinished before the host waits for the oldest (max_ongoing_fetch_events)."""
_GATHER, _RELEASE = Operators.number("zero::all_gather"), Operators.number("zero::release")


class Partitioned:
    """A parameter: a part of it on every rank, all of it while it is `available`. `number`: in the model's order."""

    def __init__(self, tape: Tape, slot: Parameter, dtype: str, zero: Zero, number: int) -> None:
        self.slot = slot
        self.number = number
        self.elements = slot.elements
        self.part = ceil_div(slot.elements, zero.degree)
        self.persists = slot.elements < zero.persistence_threshold
        self.available = False
        self.handle: Handle | None = None
        self.on_drive = False
        self.reading: int | None = None
        """The end of its part's way from a drive into a buffer of main memory, where it lies from then on."""
        storage = Storage(tape.recorder, 0, ALL_GATHER, Owner.GATHERED)
        storage.bytes = self.part * zero.degree * ITEM_BYTES[dtype]
        self.leaf = Tensor(storage, slot.shape, dtype)
        self.leaf.requires_grad = slot.requires_grad
        slot.tensor = self.leaf


class Handle:
    """Parameters that are gathered together. `flat` holds what has come until it is copied out."""

    def __init__(self, members: list[Partitioned], flat: Tensor | None, event: int) -> None:
        self.members = members
        self.flat = flat
        self.event = event
        self.landed = False


class Coordinator:
    """`own`: parameters of each module, those of its parts left out."""

    def __init__(self, tape: Tape, zero: Zero, dtype: str, own: dict[int, list[Partitioned]]) -> None:
        self.tape = tape
        self.zero = zero
        self.dtype = dtype
        self.own = own
        self.stream = COMPUTE if zero.overlap_comm is False else ALL_GATHER
        self.drive: PartDrive | None = None
        self._order: list[list[Partitioned]] = []
        """Parameters of the modules that begin, in the first pass; afterwards of every pass."""
        self._is_known = False
        self._step = 0
        self._queue: deque[tuple[Partitioned, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._live = 0
        self._fetches: deque[int] = deque()

    def begin_pass(self) -> None:
        """reset_step: a forward begins."""
        self._is_known = bool(self._order)
        self._queue = deque((p, step) for step, ps in enumerate(self._order) for p in ps)
        self._step, self._live = 0, 0
        self._fetched_for.clear()

    # -- fetch -------------------------------------------------------------------------------------------------
    def fetch(self, module: Module) -> None:
        """Gather what the module needs, wait for it, and gather ahead."""
        needed = self.own[id(module)]
        if not self._is_known:
            self._order.append(needed)
        self._gather([p for p in needed if not p.available and p.handle is None])
        for p in needed:
            if p.handle is not None:
                self._wait(p)
        self.tape.recorder.stream_waits_stream(COMPUTE, self.stream)
        if self._is_known:
            self._take_from_queue([p for p in needed if self._fetched_for.get(id(p), -1) < self._step])
            self._prefetch()
        self._step += 1

    def _take_from_queue(self, expected: list[Partitioned]) -> None:
        for _ in expected:
            if self._queue:
                p, step = self._queue.popleft()
                self._fetched_for[id(p)] = step

    def _prefetch(self) -> None:
        most = min(self.zero.max_live - self._live, self.zero.prefetch_bucket)
        ahead: list[Partitioned] = []
        while self._queue and sum(p.elements for p in ahead) < most:
            if self._queue[0][0].on_drive and self._queue[0][0].reading is None:
                break
            p, step = self._queue.popleft()
            self._fetched_for[id(p)] = max(self._fetched_for.get(id(p), -1), step)
            if not p.available and p.handle is None and p not in ahead:
                ahead.append(p)
        self._gather(ahead)
        if self.drive is not None:
            gathering = sum(p.elements for p in self._all() if p.handle is not None)
            self.drive.read_ahead([p for p, _ in self._queue], gathering)

    def _gather(self, members: list[Partitioned]) -> None:
        """One all-gather; several parameters arrive in a buffer from which each is copied."""
        if not members:
            return
        tape, recorder, ranks = self.tape, self.tape.recorder, self.zero.degree
        recorder.operator(_GATHER)
        recorder.host("fsdp_unit")
        if self.drive is not None:
            self.drive.fetch(members)
        self._live += sum(p.elements for p in members)
        elements = sum(p.part for p in members) * ranks
        flat = None
        if len(members) == 1:
            self._fill(members[0])
        else:
            flat = tape.empty((elements,), self.dtype, stream=self.stream, owner=Owner.GATHERED)
        parts = self._fetch_parts(members)
        if flat is not None:
            recorder.memory_bound("aten::cat", "copy", 2 * flat.bytes // ranks, self.stream)
        if ranks > 1:
            size_bytes = elements * ITEM_BYTES[self.dtype]
            recorder.collective(Collective("all_gather", size_bytes, "dp", ranks, self.dtype), self.stream)
        del parts
        handle = Handle(members, flat, recorder.record(self.stream))
        for p in members:
            p.handle = handle

    def _fetch_parts(self, members: list[Partitioned]) -> list[Tensor]:
        """Parts that lie in main memory are copied to the GPU one by one, and the host waits for each."""
        if self.zero.offload_param is None:
            return []
        recorder, parts = self.tape.recorder, []
        for p in sorted(members, key=lambda p: p.number):
            part = self.tape.empty((p.part,), self.dtype, stream=self.stream, owner=Owner.GATHERED)
            recorder.copy(HostCopy("host_to_device", part.bytes), self.stream)
            if self.zero.degree > 1:
                recorder.sync(recorder.record(self.stream))
            parts.append(part)
            del part
        return parts

    def _wait(self, p: Partitioned) -> None:
        """The parameter is there; the first to be waited for copies all that came with it out of the buffer."""
        recorder, handle = self.tape.recorder, p.handle
        assert handle is not None
        if len(self._fetches) > MOST_FETCHES:
            recorder.sync(self._fetches.popleft())
        if not handle.landed:
            handle.landed = True
            for member in handle.members:
                member.available = True
                if handle.flat is not None:
                    self._fill(member)
                    recorder.memory_bound("aten::cat", "copy", 2 * member.leaf.storage.bytes, self.stream)
        p.handle = None
        self._fetches.append(recorder.record(self.stream))

    def _fill(self, p: Partitioned) -> None:
        p.leaf.storage.stream = self.stream
        p.leaf.storage.owner = Owner.GATHERED
        p.leaf.storage.fill()

    # -- release -----------------------------------------------------------------------------------------------
    def release(self, module: Module) -> None:
        """Drop the module's parameters, but for small ones and those that come again within max_reuse_distance. In the
        first pass all go."""
        stays: set[int] = set()
        if self._is_known:
            distance = 0
            for upcoming in self._order[self._step :]:
                if distance >= self.zero.max_reuse_distance:
                    break
                stays |= {id(p) for p in upcoming}
                distance += sum(p.elements for p in upcoming)
        for p in self.own[id(module)]:
            if id(p) not in stays and not (p.persists and self._is_known):
                self._drop(p)

    def release_all(self) -> None:
        """The pass has ended."""
        for p in self._all():
            if not (p.persists and self._is_known):
                p.handle = None
                self._drop(p)

    def _all(self) -> list[Partitioned]:
        return list(dict.fromkeys(p for ps in self.own.values() for p in ps))

    def drop_persistent(self) -> None:
        """Before a step, which changes them."""
        for p in self._all():
            if p.persists:
                self._drop(p)

    def gather_persistent(self) -> None:
        """Small parameters are gathered after every step, together, and stay."""
        small = [p for p in self._all() if p.persists]
        if not small:
            return
        recorder = self.tape.recorder
        for p in small:
            self._fill(p)
            p.available = True
        parts = self._fetch_parts(small)
        size_bytes = sum(p.part for p in small) * self.zero.degree * ITEM_BYTES[self.dtype]
        if self.zero.degree > 1:
            recorder.collective(Collective("all_gather", size_bytes, "dp", self.zero.degree, self.dtype), self.stream)
        del parts
        recorder.stream_waits_stream(COMPUTE, self.stream)

    def _drop(self, p: Partitioned) -> None:
        """Its bytes wait until compute is through with them (record_stream)."""
        if not p.available:
            return
        self.tape.recorder.operator(_RELEASE)
        p.leaf.storage.used_by(COMPUTE)
        p.leaf.storage.drop()
        p.available, p.reading = False, None
        self._live -= p.elements
