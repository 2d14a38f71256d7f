"""FullyShardedDataParallel around every block and the model: units, where their shards lie, and clip_grad_norm_."""

from __future__ import annotations

from collections.abc import Sequence

from sim.model.module import Module
from sim.program.kernels import Collective
from sim.program.program import ALL_REDUCE, COMPUTE, Phase
from sim.runtime import scratch
from sim.runtime.sharding.family import Family
from sim.runtime.sharding.fsdp1 import Policy, Shared, Unit
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor
from sim.scenario.parallel import Fsdp1
from sim.scenario.setup import Precision
from sim.scenario.versions import minor_of

CURRENT_STREAM_FROM = (2, 8)
"""PyTorch that runs synchronous collectives on the caller's stream; before, a communicator had one of its own."""


def policy_of(fsdp: Fsdp1, precision: Precision, torch: str) -> Policy:
    """MixedPrecision and the rest. Without it gradients are reduced in the parameters' own dtype."""
    mixed = not precision.autocast and precision.compute != precision.parameters
    return Policy(
        ranks=fsdp.degree,
        replicas=fsdp.replicas,
        splits=fsdp.shards,
        reshard_after_forward=fsdp.shards and fsdp.strategy == "full_shard",
        use_orig_params=fsdp.use_orig_params,
        limit_all_gathers=fsdp.limit_all_gathers,
        backward_prefetch=fsdp.backward_prefetch,
        forward_prefetch=fsdp.forward_prefetch,
        original_dtype=precision.parameters,
        gathered_dtype=precision.compute if mixed else precision.parameters,
        reduce_dtype=precision.reduce,
        cast_inputs=precision.compute if mixed and fsdp.cast_forward_inputs else None,
        one_nccl_stream=minor_of(torch) < CURRENT_STREAM_FROM,
    )


class FullyShardedDataParallel(Family):
    """The family. Shards are made on the host and moved: blocks first, then the root, as module.to goes."""

    def __init__(self, tape: Tape, fsdp: Fsdp1, precision: Precision, torch: str) -> None:
        super().__init__(tape)
        self.fsdp = fsdp
        self.shared = Shared(tape, policy_of(fsdp, precision, torch))
        self._zero: Tensor | None = None

    def wrap(self, model: Module, blocks: Sequence[Module], outer: Sequence[Module]) -> None:
        inside = {id(slot) for block in blocks for slot in block.parameters()}
        Unit(self.shared, model, [slot for slot in model.parameters() if id(slot) not in inside])
        wrapped = outer if self.fsdp.wrap == "fsdp(checkpoint)" else blocks
        for block, module in zip(blocks, wrapped):
            Unit(self.shared, module, block.parameters())

    def place(self) -> list[Tensor]:
        root, *units = self.shared.units
        for unit in (*units, root):
            self.tape.recorder.at(Phase.INIT, unit.module.path)
            unit.parameter.place()
        return [tensor for unit in self.shared.units for tensor in unit.parameter.stepped]

    def begin(self, last: bool) -> None:
        self.shared.reduces = last or self.fsdp.gradient_sync == "every"

    def clip(self, parameters: list[Tensor]) -> None:
        """FullyShardedDataParallel.clip_grad_norm_: norms in fp32 gradient by gradient, squares summed over the ranks."""
        if not self.shared.policy.splits:
            super().clip(parameters)
            return
        tape, recorder = self.tape, self.tape.recorder
        if self._zero is None:
            self._zero = tape.empty((), "fp32")
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = [self._norm(gradient) for gradient in gradients]
        stacked = tape.pointwise("aten::stack", (len(norms),), "fp32", None, 4 * len(norms))
        norms.clear()
        local = tape.pointwise("aten::linalg_vector_norm", (), "fp32", None, stacked.bytes, "reduce")
        del stacked
        power = tape.pointwise("aten::pow", (), "fp32", None, local.bytes)
        recorder.stream_waits_stream(ALL_REDUCE, COMPUTE)
        recorder.collective(Collective("all_reduce", 4, "fsdp", self.shared.policy.ranks, "fp32"), ALL_REDUCE)
        recorder.stream_waits_stream(COMPUTE, ALL_REDUCE)
        total = tape.pointwise("aten::pow", (), "fp32", None, power.bytes)
        del power
        plus_eps, reciprocal = tape.empty((), "fp32"), tape.empty((), "fp32")
        coefficient = tape.empty((), "fp32")
        del plus_eps, reciprocal
        clamped = tape.pointwise("aten::clamp", (), "fp32", None, coefficient.bytes)
        for gradient in gradients:
            cast = None if gradient.dtype == "fp32" else tape.empty((), gradient.dtype)
            recorder.memory_bound("aten::mul_", "elementwise", 2 * gradient.bytes)
            del cast
        returned = None if gradients[0].dtype == "fp32" else tape.empty((), gradients[0].dtype)
        gradients.clear()
        del local, total, coefficient, clamped, returned

    def _norm(self, gradient: Tensor) -> Tensor:
        norm = self.tape.empty((), "fp32")
        self.tape.scratch(*scratch.norm_buffers(self.tape.device, gradient.elements))
        self.tape.recorder.memory_bound("aten::linalg_vector_norm", "reduce", gradient.bytes)
        return norm

    def finish(self) -> None:
        for unit in self.shared.units:
            unit.module.hooks = None
            if unit.parameter.flat is not None:
                unit.parameter.flat.post_hook = None
