"""The tape: PyTorch's state while a step runs, and the one way in which an operator is executed.

Hooks on saved tensors (none, checkpoint, recompute, offload) and the dispatch mode of selective checkpointing are
consulted at exactly two places: when a tensor is packed or unpacked, and at the kernel call in `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from sim.model.calls import Shape
from sim.model.calls import Tensor as ModelTensor
from sim.program.kernels import packed_bytes
from sim.program.program import Owner, Phase
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node, SavedTensor, SavedTensorHook, run_backward
from sim.runtime.recorder import Operators, Recorder
from sim.runtime.replay import run_layer
from sim.runtime.strides import Strides, follow
from sim.runtime.templates import MicroBatch, Template
from sim.runtime.tensor import Storage, Tensor

if TYPE_CHECKING:
    from sim.model.module import Module
    from sim.model.shard.context import ContextParallel
    from sim.runtime.fp8 import Fp8
    from sim.runtime.main_gradients import MainGradients
    from sim.runtime.ops.base import Op
    from sim.runtime.selective import Selective
    from sim.runtime.weight_store import PutOff


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What of the GPU decides buffer sizes."""

    sms: int = 132
    compute_capability: int = 90

    @property
    def threads_per_sm(self) -> int:
        """Resident threads per multiprocessor (CUDA C++ Programming Guide, technical specifications)."""
        return {75: 1024, 86: 1536, 87: 1536, 89: 1536, 120: 1536, 121: 1536}.get(self.compute_capability, 2048)

    @property
    def large_shared_memory(self) -> bool:
        """More than 100 KiB of shared memory per block: data-centre generations and Orin (same table)."""
        return self.compute_capability in (80, 87, 90, 100, 103)

    @property
    def blas_workspace_bytes(self) -> int:
        """cuBLAS workspace per (thread, stream): ALLOCATOR.md section 14."""
        return 32 << 20 if self.compute_capability >= 90 else 8_519_680


class Tape:
    """Runs calls of a model (it is the model's interpreter) and records what they allocate and launch."""

    rules: dict[str, Callable[..., Any]] = {}  # noqa: RUF012 (filled by sim.runtime.ops)

    def __init__(self, recorder: Recorder, device: DeviceFacts) -> None:
        self.recorder = recorder
        self.device = device
        self.grad_enabled = True
        self.sequence = 0
        self.hooks: list[SavedTensorHook] = []
        self.autocast_dtype: str | None = None
        self.autocast_cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.autocast_depth = 0
        self.selective: Selective | None = None
        self.final_callbacks: list[Callable[[], None]] = []
        self.engine_running = False
        self._thread = "main"
        self._workspaces: dict[str, Storage] = {}
        self._global_buffer: Tensor | None = None
        self.main_gradients: MainGradients | None = None
        """Where gradients are summed in fp32 apart from `.grad`, and what happens to them there (Megatron)."""
        self.fp8: Fp8 | None = None
        """Transformer Engine's casts, where layers compute in 8 bit."""
        self.tensor_ranks = 1
        """Of torchtitan's tensor parallelism: who adds up gradients of some tokens before FSDP reduces them."""
        self.first_micro_batch = True
        """The first of a step runs forward: weights are cast."""
        self.stamps = False
        """Record layers that are alike once, and stamp them."""
        self.templates: dict[Any, Template] = {}
        self.micro_batch: MicroBatch | None = None
        """Of a pipeline: the one that runs forward now."""
        self.recomputes = True
        """Do checkpointed regions recompute? A pipeline stage may keep some micro-batches whole."""
        self.context: ContextParallel | None = None
        """Ranks that share sequences in torch's context_parallel, which takes scaled_dot_product_attention over."""
        self.splits: str | None = None
        """Which part of a split backward runs: "input" or "weight"."""
        self.asynchronous = False
        """Compiled blocks run tensor-parallel products and collectives piece by piece, side by side."""
        self.gradients_are_whole = True
        """Else further tiles will add to those that arrive: hooks on accumulators wait."""
        self.weight_store: list[PutOff] | None = None
        """While the first part of Megatron's split backward runs: what its linear layers put off."""

    # -- modules -----------------------------------------------------------------------------------------------
    def enter(self, path: str) -> int:
        recorder = self.recorder
        before = recorder.base
        recorder.at_path(path)
        return before

    def leave(self, token: int) -> None:
        self.recorder.resume(token)

    def run_repeated(self, module: Module, arguments: tuple[Any, ...]) -> Tensor:
        return run_layer(self, module, arguments)

    def enable_grad(self) -> AbstractContextManager[None]:
        return self.grad_mode(True)

    def computing_loss(self, *logits: ModelTensor) -> AbstractContextManager[None]:
        for tensor in logits:
            Tensor.of(tensor).storage.belongs_to(Owner.LOSS)
        return self.phase(Phase.LOSS, Owner.LOSS, "loss")

    # -- operators ---------------------------------------------------------------------------------------------
    def apply(self, op: type[Op], inputs: tuple[Tensor | None, ...], *attributes: Any) -> Tensor:
        """One autograd-visible operator with one output."""
        output: Tensor = self._apply(op, inputs, attributes)
        return output

    def apply_tuple(self, op: type[Op], inputs: tuple[Tensor | None, ...], *attributes: Any) -> tuple[Tensor, ...]:
        """One autograd-visible operator with several outputs."""
        outputs: tuple[Tensor, ...] = self._apply(op, inputs, attributes)
        return outputs

    def _apply(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        """Node, packed inputs, kernel, packed outputs, in this order (TAPE.md 1.2)."""
        recorder = self.recorder
        recorder.where = recorder.base | op.number
        if not self.records(inputs):
            return self._kernel(op, inputs, attributes)
        node = Node(self, op, inputs, attributes)
        if not op.saves_late:
            node.saved = [SavedTensor(self, tensor) for tensor in op.saved_inputs(node, *inputs)]
        outputs = self._kernel(op, inputs, attributes)
        if op.saves_late:
            node.saved = [SavedTensor(self, tensor) for tensor in op.saved_inputs(node, *inputs)]
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        for index in op.saved_outputs:
            node.saved.append(SavedTensor(self, several[index].detach()))
        for index, tensor in enumerate(several):
            if index not in op.not_differentiable:
                tensor.node, tensor.output_index, tensor.requires_grad = node, index, True
        return outputs

    def records(self, inputs: tuple[Tensor | None, ...]) -> bool:
        """Will backward come this way?"""
        if self.grad_enabled:
            for tensor in inputs:  # a plain loop: this runs for every operator
                if tensor is not None and tensor.requires_grad:
                    return True
        return False

    def _kernel(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        if self.selective is not None and op.aten:
            return self.selective.dispatch(op.aten, lambda: op.forward(self, *inputs, *attributes))
        return op.forward(self, *inputs, *attributes)

    def dispatch(self, aten: str, kernel: Callable[[], Tensor]) -> Tensor:
        """A kernel inside an operator that selective checkpointing does not know by itself."""
        if self.selective is None:
            return kernel()
        output: Tensor = self.selective.dispatch(aten, kernel)
        return output

    # -- buffers and kernels -----------------------------------------------------------------------------------
    def empty(
        self, shape: Shape, dtype: str, strides: Strides = None, stream: int | None = None, owner: int | None = None
    ) -> Tensor:
        recorder = self.recorder
        size_bytes = packed_bytes(prod(shape), dtype)
        on, of = recorder.stream if stream is None else stream, recorder.default_owner if owner is None else owner
        storage = Storage(recorder, size_bytes, on, of)
        return Tensor(storage, shape, dtype, strides)

    def reads(self, tensors: Iterable[Tensor | None], node: str = "") -> None:
        """What is launched from here on reads these: for devices whose kernels are told apart by layouts, not by bytes."""

    def scratch(self, *sizes_bytes: int) -> None:
        """Kernel-internal buffers: all alive together, released when the kernel returns."""
        recorder = self.recorder
        handles = [recorder.alloc(size, 0, Owner.WORKSPACE) for size in sizes_bytes if size]
        while handles:
            recorder.free(handles.pop())

    def pointwise(
        self, name: str, shape: Shape, dtype: str, strides: Strides, read_bytes: int, family: str = "elementwise"
    ) -> Tensor:
        """An output and the memory-bound kernel that writes it."""
        out = self.empty(shape, dtype, strides)
        self.recorder.memory_bound(name, family, read_bytes + out.bytes)
        return out

    def pointwise_for(self, owner: Owner, name: str, shape: Shape, dtype: str) -> Tensor:
        """A tensor of this owner, filled by a kernel that reads nothing."""
        out = self.empty(shape, dtype, owner=owner)
        self.recorder.memory_bound(name, "fill", out.bytes)
        return out

    def copy(self, x: Tensor, shape: Shape | None = None) -> Tensor:
        """A copy in plain order."""
        return self.pointwise("aten::copy_", shape or x.shape, x.dtype, None, x.bytes, "copy")

    def cast_copy(self, x: Tensor, dtype: str) -> Tensor:
        """A copy in another dtype, in the order of x."""
        return self.pointwise("aten::copy_", x.shape, dtype, strides_like(x), x.bytes)

    def matmul_out(
        self,
        name: str,
        m: int,
        n: int,
        k: int,
        dtype: str,
        batch: int = 0,
        out: Tensor | None = None,
        over_rows: bool = False,
    ) -> Tensor:
        """Output of a GEMM (a new one unless given) and its launch; the first one of each host thread allocates the cuBLAS
        workspace. `over_rows`: as Gemm's."""
        if out is None:
            out = self.empty((batch, m, n) if batch else (m, n), dtype)
        if self._thread not in self._workspaces:
            size = self.device.blas_workspace_bytes
            self._workspaces[self._thread] = Storage(self.recorder, size, 0, Owner.WORKSPACE)
        self.recorder.gemm(name, m, n, k, dtype, batch or 1, over_rows)
        return out

    def stream_workspaces(self) -> None:
        """Transformer Engine's workspaces for grouped products: cuBLAS's for each of four streams, made at the first."""
        if "grouped products" not in self._workspaces:
            size = 4 * self.device.blas_workspace_bytes
            self._workspaces["grouped products"] = Storage(self.recorder, size, 0, Owner.WORKSPACE)

    def te_workspace(self) -> None:
        """Transformer Engine's for single products, made at the first (get_cublas_workspace_size_bytes)."""
        if "transformer engine" not in self._workspaces:
            size = self.device.blas_workspace_bytes if self.device.compute_capability >= 90 else 4 << 20
            self._workspaces["transformer engine"] = Storage(self.recorder, size, 0, Owner.WORKSPACE)

    def global_buffer(self, elements: int, dtype: str) -> Tensor:
        """Megatron's: made at the first use, replaced where it is too small."""
        if self._global_buffer is None or self._global_buffer.elements < elements:
            self._global_buffer = self.empty((elements,), dtype, owner=Owner.WORKSPACE)
            self._workspaces["global buffer"] = self._global_buffer.storage
        return self._global_buffer

    def workspace_is_new(self, handle: int) -> bool:
        """Has a workspace that stays been allocated at or after allocation `handle`?"""
        return any(w.handle is not None and w.handle >= handle for w in self._workspaces.values())

    def sum_to(self, gradient: Tensor, shape: Shape) -> Tensor:
        """gradient.sum_to_size(shape), with the temporaries of the reduction over leading dimensions."""
        leading = prod(gradient.shape[: len(gradient.shape) - len(shape)])
        out = self.empty(shape, gradient.dtype)
        self.scratch(*scratch.reduce_buffers(self.device, leading, prod(shape)))
        self.recorder.memory_bound("aten::sum", "reduce", gradient.bytes + out.bytes)
        return out

    def launch_accumulation(self, total: Tensor, gradient: Tensor, in_place: bool) -> None:
        """Adds a gradient to the one that has come before, which lies as `total` does."""
        self.recorder.memory_bound("aten::add", "elementwise", 3 * gradient.bytes)

    # -- grad mode, autocast -----------------------------------------------------------------------------------
    @contextmanager
    def grad_mode(self, enabled: bool) -> Iterator[None]:
        before, self.grad_enabled = self.grad_enabled, enabled
        try:
            yield
        finally:
            self.grad_enabled = before

    @contextmanager
    def autocast(self, dtype: str | None) -> Iterator[None]:
        """torch.autocast; the cache of casted weights is cleared at the exit of the outermost context."""
        before, self.autocast_dtype = self.autocast_dtype, dtype
        self.autocast_depth += 1
        try:
            yield
        finally:
            self.autocast_dtype = before
            self.autocast_depth -= 1
            if self.autocast_depth == 0:
                self.autocast_cache.clear()

    def generator_state(self) -> Tensor | None:
        """What a checkpointed region keeps on the device of the generator's state: nothing, a GPU's is kept on the host."""
        return None

    # -- backward ----------------------------------------------------------------------------------------------
    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, walk: Callable[[Any, Gradients], None] | None = None
    ) -> None:
        """loss.backward(gradient). The root gradient lives until it returns. `walk`: instead of the engine's whole walk
        from the root node."""
        recorder = self.recorder
        before = recorder.base, recorder.default_owner
        assert loss.node is not None
        recorder.enter_backward(loss.node.base, _ONES_LIKE)
        root = gradient if gradient is not None else self.pointwise("aten::ones_like", loss.shape, loss.dtype, None, 0)
        self._thread, self.engine_running = "autograd", True
        with self.grad_mode(False):
            if walk is not None:
                walk(loss.node, [root])
            else:
                run_backward(self, loss.node, [root])
            while self.final_callbacks:
                self.final_callbacks.pop(0)()
        self._thread, self.engine_running = "main", False
        recorder.resume(before[0])
        recorder.default_owner = before[1]

    def run_formula(self, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        """A node's backward."""
        return node.op.backward(self, node, gradients, saved)

    @contextmanager
    def phase(self, phase: Phase, owner: Owner, path: str = "") -> Iterator[None]:
        """Everything inside belongs to this phase; new buffers belong to `owner` unless told otherwise."""
        recorder = self.recorder
        before = recorder.base, recorder.default_owner
        recorder.at(phase, path)
        recorder.default_owner = int(owner)
        try:
            yield
        finally:
            recorder.resume(before[0])
            recorder.default_owner = before[1]


def strides_like(x: Tensor) -> Strides:
    """Strides of an elementwise result of x."""
    return None if x.strides is None else follow(x.shape, x.strides)


_ONES_LIKE = Operators.number("aten::ones_like")
