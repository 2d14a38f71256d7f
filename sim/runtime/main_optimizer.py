"""Megatron's mixed-precision Adam: fp32 copies of 16-bit parameters, updated from the main gradients.

Per parameter 4 bytes of main parameter and 8 of moments (4 in bf16), on every replica or (distributed optimizer) split
over them.
Source: megatron-core 0.16.1, optimizer/optimizer.py, distrib_optimizer.py, clip_grads.py, read there; no recording.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.program.kernels import ITEM_BYTES, Collective
from sim.program.program import COMPUTE, Owner
from sim.runtime.main_gradients import MainGradients, shard_group
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

ADAM_BYTES = 12  # per parameter: reads gradient and parameter, writes parameter, all fp32; moments come on top


class MainOptimizer:
    """`parameters` are the 16-bit ones. Main parameters exist from the start, moments from the first step on."""

    def __init__(self, tape: Tape, parameters: list[Tensor], gradients: MainGradients) -> None:
        self.tape = tape
        self.parameters = parameters
        self.gradients = gradients
        self.state: list[Tensor] = []
        data = gradients.data
        if data.distributed_optimizer:
            shares = [bucket.elements // bucket.replicas.shards for bucket in gradients.buckets]
        else:
            shares = [parameter.elements for parameter in parameters]
        self.main = [tape.empty((share,), "fp32", owner=Owner.OPTIMIZER) for share in shares]
        self.elements = sum(shares)
        if data.distributed_optimizer:
            dtypes = [bucket.replicas.dtype for bucket in gradients.buckets]
        else:
            dtypes = [parameter.dtype for parameter in parameters]
        self._copied_bytes = sum((4 + ITEM_BYTES[dtype]) * share for dtype, share in zip(dtypes, shares))
        tape.recorder.memory_bound("aten::copy_", "elementwise", self._copied_bytes)

    def prepare(self) -> None:
        """fp16: gradients are unscaled and checked; the host reads whether any overflowed."""
        if self.parameters[0].dtype == "fp16":
            recorder = self.tape.recorder
            recorder.memory_bound("aten::_amp_foreach_non_finite_check_and_unscale_", "elementwise", 8 * self.elements)
            self._agree()
            recorder.sync(recorder.record(COMPUTE))

    def clip(self, norm_is_summed: Callable[[], None]) -> None:
        """multi_tensor_l2norm, a sum over all ranks that hold other parameters, the norm read by the host, a scale."""
        recorder = self.tape.recorder
        recorder.memory_bound("multi_tensor_l2norm", "reduce", 4 * self.elements)
        self._agree()
        norm_is_summed()
        recorder.sync(recorder.record(COMPUTE))
        recorder.memory_bound("multi_tensor_scale", "elementwise", 8 * self.elements)

    def step(self) -> None:
        """Adam on the fp32 shares, copied into the 16-bit parameters; with shares, these are gathered."""
        recorder = self.tape.recorder
        if not self.state:
            for main in self.main:
                self._create_moments(main)
        adam_bytes = ADAM_BYTES + 4 * ITEM_BYTES[self.gradients.data.moments]  # two moments, read and written
        recorder.memory_bound("multi_tensor_adam", "optimizer", adam_bytes * self.elements)
        recorder.memory_bound("multi_tensor_scale", "elementwise", self._copied_bytes)
        data = self.gradients.data
        if not data.distributed_optimizer:
            return
        for bucket in self.gradients.buckets:
            replicas, size_bytes = bucket.replicas, bucket.elements * ITEM_BYTES[bucket.replicas.dtype]
            if replicas.shards > 1:
                group = shard_group(replicas.group, data.optimizer_instances)
                work = Collective("all_gather", size_bytes, group, replicas.shards, replicas.dtype)
                recorder.collective(work, COMPUTE)

    def zero_grad(self) -> None:
        self.gradients.zero_grad()

    def _create_moments(self, main: Tensor) -> None:
        for _ in range(2):
            moment = self.tape.empty(main.shape, self.gradients.data.moments, owner=Owner.OPTIMIZER)
            self.tape.recorder.memory_bound("aten::zeros_like", "fill", moment.bytes)
            self.state.append(moment)

    def _agree(self) -> None:
        """One number over the groups that split parameters."""
        recorder, gradients = self.tape.recorder, self.gradients
        if gradients.data.distributed_optimizer and gradients.data.degree > 1:
            recorder.collective(Collective("all_reduce", 4, "dp", gradients.data.degree, "fp32"), COMPUTE)
        if gradients.tensor_ranks > 1:
            recorder.collective(Collective("all_reduce", 4, "tp", gradients.tensor_ranks, "fp32"), COMPUTE)
