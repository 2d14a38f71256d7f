"""FSDP1's flat parameter: all parameters of a unit in one tensor, of which every rank keeps an equal part.

The gathered tensor and the low-precision shard are made once; their bytes come and go. Views into the gathered tensor
are made on the unshard stream, so autograd runs their backward (one cat of all gradients) there as well.
Source: torch 2.14, distributed/fsdp/_flat_param.py; recorded.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from sim.model.module import Parameter
from sim.program.kernels import ITEM_BYTES, Collective
from sim.program.program import ALL_GATHER, ALL_GATHER_COPY_IN, COMPUTE, DATA, Owner
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op
from sim.runtime.recorder import Operators
from sim.runtime.scratch import ceil_div, round_up
from sim.runtime.tape import Tape
from sim.runtime.tensor import Storage, Tensor

if TYPE_CHECKING:
    from sim.runtime.sharding.fsdp1 import Policy

PRE_UNSHARD, UNSHARD = ALL_GATHER_COPY_IN, ALL_GATHER
ALIGNMENT_BYTES = 16
_GATHER, _RESHARD = Operators.number("fsdp::all_gather"), Operators.number("fsdp::reshard")


class _Views(Op):
    """torch.split of the flat parameter, and a view per part. Backward: one cat, on the unshard stream."""

    node = "SplitWithSizesBackward0"

    @staticmethod
    def forward(tape: Tape, flat: Tensor, sizes: list[tuple[tuple[int, ...], bool]]) -> tuple[Tensor, ...]:
        return tuple(flat.alias(shape) for shape, _ in sizes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        recorder = tape.recorder
        (shape, dtype), (sizes,) = node.metas[0], node.attributes
        recorder.stream_waits_stream(UNSHARD, COMPUTE)
        gradients += [None] * (len(sizes) - len(gradients))
        zeros = []
        for gradient, (part, _) in zip(gradients, sizes):
            if gradient is not None:
                gradient.storage.used_by(UNSHARD)
            else:
                zeros.append(tape.empty(part, dtype, stream=UNSHARD))
                recorder.memory_bound("aten::zeros", "fill", zeros[-1].bytes, UNSHARD)
        whole = tape.empty(shape, dtype, stream=UNSHARD)
        recorder.memory_bound("aten::cat", "copy", 2 * whole.bytes, UNSHARD)
        return [whole]


class FlatParameter:
    """`slots` of one unit, in order. `parts`: (shape, is padding) of everything in the flat parameter."""

    def __init__(self, tape: Tape, slots: list[Parameter], policy: Policy) -> None:
        self.tape = tape
        self.slots = slots
        self.policy = policy
        self.parts: list[tuple[tuple[int, ...], bool]] = []
        self._fill_parts()
        self.elements = sum(prod(shape) for shape, _ in self.parts)
        self.shard_elements = ceil_div(self.elements, policy.ranks if policy.splits else 1)
        self.shard: Tensor | None = None
        """This rank's part in the parameters' own dtype; of everything if nothing is split."""
        self.stepped: list[Tensor] = []
        """What the optimizer sees: the shard, or views of the parameters in it."""
        self.low_precision: Storage | None = None
        """The shard in the compute dtype, while it is gathered."""
        self.gathered: Storage | None = None
        self.flat: Tensor | None = None
        """The leaf of autograd: the gathered parameter without padding at its end."""

    def _fill_parts(self) -> None:
        """With use_orig_params every parameter begins at 16 bytes, and all of them divide by the ranks."""
        policy, elements = self.policy, 0
        aligned = ALIGNMENT_BYTES // ITEM_BYTES[policy.gathered_dtype] if policy.use_orig_params else 1
        for slot in self.slots:
            self._pad(round_up(elements, aligned) - elements)
            elements = round_up(elements, aligned) + slot.elements
            self.parts.append((slot.shape, False))
        if policy.use_orig_params:
            self._pad(round_up(elements, policy.ranks) - elements)

    def _pad(self, elements: int) -> None:
        if elements:
            self.parts.append(((elements,), True))

    # -- set-up ------------------------------------------------------------------------------------------------
    def place(self) -> None:
        """The shard on the device."""
        shard = self.tape.empty((self.shard_elements,), self.policy.original_dtype, owner=Owner.PARAMETER)
        shard.requires_grad = True
        self.shard = shard
        self.stepped = list(self.views_of(shard)) if self.policy.use_orig_params else [shard]

    def views_of(self, shard: Tensor) -> list[Tensor]:
        """The parameters, or beginnings of parameters, that lie in rank 0's shard."""
        views, begin = [], 0
        for shape, padding in self.parts:
            if begin < self.shard_elements and not padding:
                shape = shape if not self.policy.splits else (min(prod(shape), self.shard_elements - begin),)
                view = shard.alias(shape)
                view.requires_grad = True
                views.append(view)
            begin += prod(shape)
        return views

    def initialize(self) -> None:
        """init_flat_param_attributes, in the first forward: what will be filled later is allocated once and freed."""
        tape, policy = self.tape, self.policy
        assert self.shard is not None
        if policy.casts:
            low = tape.empty((self.shard_elements,), policy.gathered_dtype, owner=Owner.GATHERED)
            self.low_precision = low.storage
            self.low_precision.drop()
            if not policy.splits:
                self.flat = low.alias(low.shape)
            self._low = low
        if policy.splits:
            padded = (self.shard_elements * policy.ranks,)
            gathered = tape.empty(padded, policy.gathered_dtype, owner=Owner.GATHERED)
            self.gathered = gathered.storage
            self.gathered.drop()
            self.flat = gathered.alias((self.elements,))
            if policy.casts:
                tape.scratch(prod(padded) * ITEM_BYTES[policy.original_dtype])
        elif not policy.casts:
            self.flat = self.shard.alias((self.elements,))
        assert self.flat is not None
        self.flat.requires_grad = True

    # -- gradients of what is stepped, with use_orig_params -----------------------------------------------------
    def use_gradient(self, gradient: Tensor) -> None:
        """Views of the shard's gradient."""
        if self.policy.use_orig_params:
            for stepped in self.stepped:
                stepped.grad = gradient.alias(stepped.shape)

    def use_unreduced_gradient(self) -> None:
        """Views of the whole gradient that waits for others; one of the shard's size is made and replaced first."""
        if not self.policy.use_orig_params or self.flat is None or self.flat.grad is None:
            return
        for stepped in self.stepped:
            if stepped.grad is None and self.policy.splits:
                Storage(self.tape.recorder, stepped.bytes, UNSHARD, Owner.GRADIENT).drop()
            stepped.grad = self.flat.grad.alias(stepped.shape)

    def forget_gradient(self) -> None:
        """_reset_flat_param_grad_info_if_needed: zero_grad has dropped the views; the bytes go only now."""
        dropped = self.policy.use_orig_params and all(stepped.grad is None for stepped in self.stepped)
        if dropped and self.shard is not None:
            self.shard.grad = None

    # -- unshard and reshard -----------------------------------------------------------------------------------
    @property
    def needs_unshard(self) -> bool:
        return self.gathered is not None and self.gathered.handle is None

    def pre_unshard(self) -> bool:
        """Cast the shard on a stream of its own. Returns whether anything was done."""
        policy, recorder = self.policy, self.tape.recorder
        if not policy.casts or (policy.splits and not self.needs_unshard):
            return False
        assert self.low_precision is not None
        self.low_precision.stream = PRE_UNSHARD
        self.low_precision.fill()
        moved = self.shard_elements * (ITEM_BYTES[policy.original_dtype] + ITEM_BYTES[policy.gathered_dtype])
        recorder.memory_bound("aten::copy_", "elementwise", moved, PRE_UNSHARD)
        return True

    def unshard(self) -> None:
        """Gather the parameter, if that is still to do, and drop the cast shard."""
        policy, recorder = self.policy, self.tape.recorder
        if self.needs_unshard:
            assert self.gathered is not None
            recorder.operator(_GATHER)
            recorder.host("fsdp_unit")
            self.gathered.stream = UNSHARD
            self.gathered.fill()
            work = Collective("all_gather", self.gathered.bytes, "fsdp", policy.ranks, policy.gathered_dtype)
            self.communicate(work, UNSHARD)
        if policy.splits:
            self._drop_low_precision(UNSHARD)

    def communicate(self, work: Collective, stream: int) -> None:
        """A collective of the shard group, on the present stream or on the communicator's own, which is waited for."""
        recorder = self.tape.recorder
        if not self.policy.one_nccl_stream:
            recorder.collective(work, stream)
            return
        recorder.stream_waits_stream(DATA, stream)
        recorder.collective(work, DATA)
        recorder.stream_waits_stream(stream, DATA)

    def use_views(self) -> None:
        """The parameters that forward sees: views of the flat one, whoever switched gradients off."""
        assert self.flat is not None
        with self.tape.grad_mode(True):
            views = self.tape.apply_tuple(_Views, (self.flat,), self.parts)
        parameters = (view for view, (_, padding) in zip(views, self.parts) if not padding)
        for slot, view in zip(self.slots, parameters):
            slot.tensor = view

    def reshard(self, free: bool, stream: int) -> None:
        """Give the gathered parameter back once `stream`, the present one, has done what it was given."""
        self.tape.recorder.operator(_RESHARD)
        if free and self.gathered is not None:
            self.gathered.used_by(stream)
            self.gathered.drop()

    def post_reshard(self, stream: int) -> None:
        """Without shards the cast parameter is the one that was computed with."""
        if not self.policy.splits:
            self._drop_low_precision(stream)

    def _drop_low_precision(self, stream: int) -> None:
        if self.low_precision is not None:
            self.low_precision.used_by(stream)
            self.low_precision.drop()
