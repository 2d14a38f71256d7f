"""What is remembered of layers that are alike: what a live one issued, and whose handle each memory event is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.model.calls import Shape
from sim.model.module import Parameter
from sim.runtime.recorder import Places, Recorder, Recording
from sim.runtime.strides import Strides
from sim.runtime.tensor import Storage, Tensor

if TYPE_CHECKING:
    from sim.runtime.tape import Tape

FORWARD, BACKWARD, INCOMING, HELD = range(4)  # whose handle an event of a template is about; HELD + i: held tensor i


class ReplayMismatch(Exception):
    """A stamped layer is not in the state that its template was recorded in."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A layer's place among those alike: which kind, number `index` of `count`; its own module paths and parameters.

    `again`: it runs many times per step, and whatever it shares with others is held outside too (pipeline stages), so
    that it may learn from itself and none is special for being first or last.
    """

    kind: int
    index: int
    count: int
    paths: tuple[str, ...]
    slots: tuple[Parameter, ...]
    again: bool = False


@dataclass(frozen=True, slots=True)
class Born:
    """A tensor that a template leaves behind: its handle counted from the first of the pass that allocated it (FORWARD:
    backward's result may lie in a buffer that forward saved, where a compiled block reuses it)."""

    handle: int
    made_in: int
    shape: Shape
    dtype: str
    strides: Strides

    @classmethod
    def of(cls, tensor: Tensor, *passes: range) -> Born:
        """`passes`: the handles of each so far."""
        handle = tensor.storage.handle
        for made_in, handles in enumerate(passes):
            if handle is not None and handle in handles and not tensor.storage.stream:
                return cls(handle - handles.start, made_in, tensor.shape, tensor.dtype, tensor.strides)
        raise ReplayMismatch("a result of a layer is not its own")

    def tensor(self, tape: Tape, *first: int) -> Tensor:
        storage = Storage.adopt(tape.recorder, first[self.made_in] + self.handle)
        return Tensor(storage, self.shape, self.dtype, self.strides)


@dataclass(frozen=True, slots=True)
class Stamp:
    """One pass of a layer: what it issued, and whose handle each memory event is about."""

    recording: Recording
    owner_kind: npt.NDArray[np.int64]
    """Per memory event: FORWARD, BACKWARD, INCOMING or HELD + i; the event's handle counts from that owner's first."""
    sequences: int
    paths: tuple[str, ...]
    moved: dict[tuple[str, ...], Places] = field(default_factory=dict)
    """Where it happens in the layer at other paths."""

    def append(self, tape: Tape, paths: tuple[str, ...], first: tuple[int, ...]) -> None:
        """Issue it again for the layer at `paths`; `first`: first handle of each kind of owner."""
        places = self.moved.get(paths)
        if places is None:
            places = self.moved[paths] = tape.recorder.moved(self.recording, self.paths, paths)
        tape.recorder.append(self.recording, np.array(first, np.int64)[self.owner_kind], places)
        tape.sequence += self.sequences


@dataclass(frozen=True, slots=True)
class Backward:
    """What is known of a layer's backward."""

    stamp: Stamp
    frees: tuple[bool, ...]
    """Of the template's `holds`: whose bytes it frees."""
    frees_incoming: bool
    incoming_handles: int
    gradient: Born | None  # None: the incoming gradient itself goes on
    parameter_gradients: tuple[Born | None, ...]


Present = tuple[bool, ...]
"""Per parameter of a layer: has it a gradient already?"""


class MicroBatch(NamedTuple):
    """Of a pipeline stage. `is_first`: of a step to come back, so that there are no gradients then; `in_order`: those that
    run forward later come back later."""

    number: int
    is_first: bool
    in_order: bool


@dataclass(slots=True)
class Template:
    """What is known of layers of one key; a pass is missing until a live layer has shown it."""

    forward: Stamp | None = None
    output: Born | None = None
    bases: dict[tuple[str, ...], int] = field(default_factory=dict)
    """By the paths of a layer: where the operator stands whose result is the layer's."""
    holds: tuple[int, ...] = ()
    """Tensor arguments, by number, that the layer saves."""
    input_owner: int | None = None
    backwards: dict[Present, Backward] = field(default_factory=dict)
    expected: dict[bool, Present] = field(default_factory=dict)
    """By `MicroBatch.is_first`: gradients that were present when such a one came back."""
    shown_by: int | None = None
    """The micro-batch, not a step's first, that runs live in order to show its backward."""

    def base_at(self, paths: tuple[str, ...], recorder: Recorder) -> int:
        """Where the layer at `paths` makes its result."""
        base = self.bases.get(paths)
        if base is None:
            known, first = next(iter(self.bases.items()))
            base = self.bases[paths] = recorder.moved_base(first, known, paths)
        return base

    @property
    def shares(self) -> bool:
        """The layer saves a tensor that other layers save too: whoever lets it go last must run live."""
        return not all(all(backward.frees) for backward in self.backwards.values())

    def knows_backward(self, micro_batch: MicroBatch | None, present: Present) -> bool:
        """The backward of a forward that begins now. Outside a pipeline it comes before anything else does; in one, an
        earlier micro-batch may be about to show it."""
        if micro_batch is None:
            return present in self.backwards
        if self.expected.get(micro_batch.is_first) in self.backwards:
            return True
        if micro_batch.is_first or not micro_batch.in_order:
            return False
        if self.shown_by is None:
            self.shown_by = micro_batch.number
        return self.shown_by != micro_batch.number
