"""A training script without values: build, shard, then steps of forward, loss, backward, clip, optimizer, zero_grad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from sim.model.adapters import is_trained
from sim.model.build import build_model
from sim.model.calls import Tensor as ModelTensor
from sim.model.config import ModelConfig
from sim.model.language_model import LanguageModel
from sim.model.llama import TitanLlama
from sim.model.module import Buffer, Parameter
from sim.program.kernels import Collective
from sim.program.program import COMPUTE, Owner, Phase, Program
from sim.runtime import ops
from sim.runtime.accumulation import MicroBatches
from sim.runtime.compiled.region import CompiledLoss
from sim.runtime.extend import NotPeriodic
from sim.runtime.fp8 import start_fp8
from sim.runtime.grad_scaler import GradScaler
from sim.runtime.host_adamw import HostAdamW
from sim.runtime.host_memory import HostMemory
from sim.runtime.main_gradients import MainGradients, replicas_of
from sim.runtime.main_optimizer import MainOptimizer
from sim.runtime.offload import SaveOnCpu
from sim.runtime.ops.nf4 import Quantizer
from sim.runtime.optimizer import CpuAdamW, StepOptimizer, clip_grad_norm
from sim.runtime.optimizers import InBackward, make_optimizer
from sim.runtime.placement import place_buffers, place_parameters
from sim.runtime.recorded import recorded
from sim.runtime.recorder import Recorder
from sim.runtime.regions import apply_checkpoint, stacks_of
from sim.runtime.replay import stampable
from sim.runtime.sharding.communication import Communication
from sim.runtime.sharding.families import make_family
from sim.runtime.sharding.partial_gradients import sum_partial_gradients
from sim.runtime.tape import DeviceFacts, Tape
from sim.runtime.tensor import Tensor
from sim.runtime.torch_context import TorchContext
from sim.runtime.unfold import unfold
from sim.runtime.wrap import apply_compile, apply_fsdp, apply_offload, convert_to_float8, mark_repeats
from sim.scenario.parallel import DataParallel
from sim.scenario.setup import Optimizer, Setup

assert ops  # importing it fills the tape's rules


def record_training(
    setup: Setup, steps: int = 2, fail_at: int | None = None, stamps: bool = True, folds: bool = True
) -> Program:
    """Everything that one rank (rank 0) issues in `steps` training steps of a transformer.

    `stamps`: record layers that are alike once; `folds`: micro-batches that are alike (same program, sooner).
    `fail_at`: number of the allocation that the allocator refuses; the program then ends with what unwinding frees.
    """
    run = TrainingRun(setup, Recorder(fail_at), folds=folds and fail_at is None)
    program = recorded(run, steps, stamps and fail_at is None and stampable(setup))
    try:
        return unfold(program, run.micro_batches.folded)
    except NotPeriodic:
        return record_training(setup, steps, fail_at, stamps, folds=False)


class TrainingRun:
    """The script's state: model, optimizer, data of the present micro-batch.

    `tokens`, `targets`, `logits`, `loss` are the script's own variables: they survive an OutOfMemory raised below them
    (with the loss the graph survives), as in a script that catches the error around its loop.
    """

    def __init__(
        self,
        setup: Setup,
        recorder: Recorder,
        models: list[LanguageModel] | None = None,
        tape: Tape | None = None,
        folds: bool = False,
    ) -> None:
        """`models`: the stages that a rank of a pipeline holds. Default: the whole model. `tape`: of a device that is no
        GPU, on this recorder. `folds`: leave out micro-batches that are like others."""
        assert isinstance(setup.model, ModelConfig)
        self.setup = setup
        self.trains = setup.mode == "train"
        self.config = setup.model if self.trains else evaluated(setup.model)
        self.recorder = recorder
        self.micro_batches = MicroBatches(recorder, setup.batch.accumulation, folds)
        gpu = setup.cluster.gpu
        major, minor = gpu.compute_capability
        self.tape = tape or Tape(recorder, DeviceFacts(sms=gpu.sms, compute_capability=10 * major + minor))
        self.tape.tensor_ranks = setup.tensor.degree if self.config.implementation == "torchtitan" else 1
        self.tape.asynchronous = setup.tensor.asynchronous
        self.models = models or [build_model(self.config, setup.tensor, setup.expert, setup.context)]
        self.model: LanguageModel = self.models[0]
        # as the optimizer sees them, whatever wraps the layers
        self.slots = [named for model in self.models for named in model.named_parameters()]
        self.tensors = [named for model in self.models for named in model.named_tensors()]
        for name, slot in self.slots:
            slot.requires_grad = is_trained(self.config, name)
        self.communications: list[Communication] = []
        self.quantizer = Quantizer(self.tape)
        self.host = HostMemory(recorder)
        """Pinned memory for parameters, gradients and optimizer states under FSDP's CPU offload and ZeRO-Offload."""
        self.saved_on_host: HostMemory | None = None
        """For save_on_cpu around the whole forward."""
        self.parameters: list[Tensor] = []
        self.optimizer: StepOptimizer | MainOptimizer | CpuAdamW | None = None
        self.in_backward: InBackward | None = None
        self.main_gradients: MainGradients | None = None
        self.scaler = GradScaler(self.tape) if setup.precision.grad_scaler and self.trains else None
        cuts = setup.context.degree > 1 and self.config.implementation == "torchtitan"
        self.context = TorchContext(self.tape, setup.context) if cuts else None
        self.family = make_family(self.tape, setup, self.host)
        self.compute_loss: Callable[..., ModelTensor] = self.model.loss
        self.tokens: ModelTensor | None = None
        self.targets: ModelTensor | None = None
        self.logits: ModelTensor | None = None
        self.loss: Tensor | None = None

    # -- set-up ------------------------------------------------------------------------------------------------
    def initialize(self) -> None:
        """Wrap, shard, and put the parameters (and buffers) on the device."""
        setup, tape, offload = self.setup, self.tape, self.setup.offload
        for number, model in enumerate(self.models):
            blocks = [block for layers in stacks_of(model) for block in layers]
            if setup.precision.float8 is not None and setup.compile is None:
                convert_to_float8(blocks)
            outer = apply_checkpoint(tape, model, setup.checkpoint)
            if setup.compile is not None:
                outer = apply_compile(tape, model, setup.precision.float8)
                if setup.compile.loss:
                    self.compute_loss = CompiledLoss(tape, model.loss)
            if setup.fsdp is not None:
                communication = apply_fsdp(tape, model, model.managed_parameters(), blocks, outer, setup, self.host)
                self.communications.append(communication)
            if self.family is not None:
                self.family.wrap(model, blocks, outer)
            if offload is None:
                mark_repeats(model, setup.pipeline is not None, number << 16)
            elif offload.layers is not None:
                apply_offload(tape, model, offload)
        if offload is not None and offload.what == "saved_tensors" and offload.layers is None:
            self.saved_on_host = HostMemory(self.recorder, offload.pinned, offload.pinned_pool)
        with self.tape.phase(Phase.INIT, Owner.PARAMETER):
            self.parameters = place_parameters(self)
            place_buffers(self)
            start_fp8(tape, setup, [slot for _, slot in self.slots])
        if self.family is not None:
            buffers = [slot.tensor for _, slot in self.tensors if isinstance(slot, Buffer)]
            buffers += [model.rope for model in self.models if isinstance(model, TitanLlama)]
            with tape.phase(Phase.INIT, Owner.GRADIENT):
                self.family.start(self.parameters, [buffer for buffer in buffers if isinstance(buffer, Tensor)])
        if setup.data is not None and self.trains:
            with tape.phase(Phase.INIT, Owner.GRADIENT):
                self._make_main_gradients(setup.data)
        elif setup.optimizer is not None and self.trains:
            with tape.phase(Phase.INIT, Owner.OPTIMIZER):
                self._make_optimizer(setup.optimizer)
        self.recorder.mark("init")

    @property
    def on_host(self) -> bool:
        """Parameters, gradients and optimizer states live on the host."""
        return self.setup.fsdp is not None and self.setup.fsdp.cpu_offload

    def _make_optimizer(self, setup: Optimizer) -> None:
        if self.on_host:
            units = [unit for communication in self.communications for unit in communication.units]
            shards = [p for unit in units for p in unit.group.parameters if p.slot.requires_grad]
            self.optimizer = CpuAdamW(self.tape, shards, self.setup.precision.parameters, setup.variant, self.host)
        elif setup.offload is not None:
            self.optimizer = HostAdamW(self.tape, self.parameters, setup)
        elif setup.in_backward:
            self.in_backward = InBackward(self.tape, self.parameters, setup)
        elif self.family is not None:
            self.optimizer = self.family.make_optimizer(self.parameters, setup)
        else:
            self.optimizer = make_optimizer(self.tape, self.parameters, setup)

    def _make_main_gradients(self, data: DataParallel) -> None:
        """Megatron's gradient buffer, then its fp32 parameters."""
        setup, tape = self.setup, self.tape
        slots = [slot for _, slot in self.slots if slot.requires_grad]
        spread = setup.expert.degree > 1
        shared = _tensors(slot for slot in slots if not (spread and slot.of_expert))
        experts = _tensors(slot for slot in slots if spread and slot.of_expert)
        kinds = [
            *replicas_of(shared, data.degree, data),
            *replicas_of(experts, setup.mesh.degree("edp"), data, "edp"),
        ]
        partial = _tensors(slot for slot in slots if slot.partial)
        self.main_gradients = tape.main_gradients = MainGradients(
            tape,
            kinds,
            partial,
            data,
            setup.precision.reduce,
            setup.tensor.degree,
        )
        if setup.optimizer is not None:
            self.optimizer = MainOptimizer(tape, shared + experts, self.main_gradients)

    # -- one step ----------------------------------------------------------------------------------------------
    def step(self, number: int) -> None:
        setup, mark = self.setup, self.recorder.mark
        if setup.batch.tokens == "per_step":
            self._load_data()
            mark(f"s{number}.data")
        for micro_batch in self.micro_batches:
            is_last = self.micro_batches.is_last(micro_batch)
            if setup.batch.tokens == "per_micro_batch":
                self._load_data()
            if micro_batch == 0 and self._zeroes_at("start"):
                self._zero_grad()
            self.tape.first_micro_batch = micro_batch == 0
            self._set_gradient_sync(is_last)
            if self.context is not None:
                self.context.enter(self)
            self._forward()
            mark(f"s{number}.fwd{micro_batch}")
            assert self.loss is not None
            if self.trains:
                self._backward(self.loss)
                mark(f"s{number}.bwd{micro_batch}")
            if self.context is not None:
                self.context.leave(self)
            self.logits = None
            if is_last and "loss" in setup.host.sync:
                self.recorder.sync(self.recorder.record(COMPUTE))
            self.loss = None
        self._finish_gradients()
        self._optimize(number)
        mark(f"s{number}.end")

    def _forward(self) -> None:
        """Forward and loss under the strategy's contexts. Logits that the model returns are a variable of the script,
        which it drops after the loss unless it keeps them."""
        tape, model, keep = self.tape, self.model, self.config.keep_logits
        assert self.tokens is not None and self.targets is not None
        with (
            self._autocast(),
            self._offload(),
            tape.grad_mode(self.setup.mode != "no_grad"),
            tape.phase(Phase.FORWARD, Owner.ACTIVATION),
        ):
            if model.returns_logits and self.config.loss_chunks == 1:
                self.logits = model(self.tokens)
                with tape.computing_loss(self.logits):
                    self.loss = Tensor.of(self.compute_loss(self.logits, self.targets))
                self.logits = self.logits if keep else None
            else:
                loss, logits = model.compute_loss(self.tokens, self.targets)
                self.loss, self.logits = Tensor.of(loss), logits if keep else None

    def _backward(self, loss: Tensor) -> None:
        optimizer = self.optimizer
        told = optimizer if isinstance(optimizer, StepOptimizer) else None
        if told is not None:
            with self.tape.phase(Phase.BACKWARD, Owner.OTHER):
                told.before_backward()
        self.tape.backward(loss if self.scaler is None else self.scaler.scaled(loss))
        if told is not None:
            with self.tape.phase(Phase.BACKWARD, Owner.OTHER):
                told.after_backward()

    def _finish_gradients(self) -> None:
        """What Megatron does to gradients after the last backward."""
        with self.tape.phase(Phase.BACKWARD, Owner.GRADIENT):
            if self.main_gradients is not None:
                self.main_gradients.finish()
            elif self.config.implementation == "megatron" and self.trains:
                sum_partial_gradients(self.tape, self.communications, self.setup.tensor.degree)

    def _optimize(self, number: int) -> None:
        setup, mark, tape = self.setup, self.recorder.mark, self.tape
        optimizer = self.optimizer
        if optimizer is None or setup.optimizer is None:
            return
        with tape.phase(Phase.OPTIMIZER, Owner.OPTIMIZER):
            optimizer.prepare()
            if (
                self.scaler is not None
                and setup.optimizer.clip_norm is not None
                and isinstance(optimizer, StepOptimizer)
            ):
                self.scaler.unscale(optimizer)
        if setup.optimizer.clip_norm is not None:
            with tape.phase(Phase.CLIP, Owner.OTHER):
                self._clip(optimizer)
            mark(f"s{number}.clip")
        with tape.phase(Phase.OPTIMIZER, Owner.OPTIMIZER), tape.grad_mode(False):
            if self.scaler is not None and isinstance(optimizer, StepOptimizer):
                self.scaler.before_step(optimizer)
            optimizer.step()
            if self.scaler is not None:
                self.scaler.update()
            for communication in self.communications:
                communication.scale_matrices(self.tape)
        mark(f"s{number}.opt")
        if self._zeroes_at("end"):
            self._zero_grad()
            mark(f"s{number}.zero")

    def _clip(self, optimizer: StepOptimizer | MainOptimizer | CpuAdamW) -> None:
        if isinstance(optimizer, MainOptimizer):
            optimizer.clip(self._norm_is_summed)
        elif isinstance(optimizer, CpuAdamW):
            optimizer.clip()
        elif self.family is not None:
            self.family.clip(optimizer.clipped)
        else:
            shard_ranks = self.setup.fsdp.degree if self.setup.fsdp is not None else 1
            clip_grad_norm(self.tape, optimizer.clipped, shard_ranks, self._norm_is_summed)

    # -- parts -------------------------------------------------------------------------------------------------
    def _load_data(self, micro_batches: int = 1) -> None:
        """New token and target ids; the previous ones die as the names are rebound."""
        sequences, target_len = micro_batches * self.setup.batch.micro_batch, self.setup.batch.target_len
        length = self.setup.local_tokens if self.context is None else self.setup.batch.seq_len
        tokens, targets = self.model.inputs(sequences, length, target_len)
        with self.tape.phase(Phase.DATA, Owner.OTHER):
            self.recorder.host("data")
            self.tokens = self.tape.empty(*tokens)
            self.targets = self.tape.empty(*targets)

    def _norm_is_summed(self) -> None:
        """A pipeline's stages add up their squared norms here, and tensor-parallel ranks under FSDP."""
        ranks = self.setup.tensor.degree if self.setup.fsdp is not None else 1
        if ranks > 1:
            self.recorder.collective(Collective("all_reduce", 4, "tp", ranks, "fp32"), COMPUTE)

    def _zero_grad(self) -> None:
        zeroed = self.optimizer or self.main_gradients
        assert zeroed is not None
        with self.tape.phase(Phase.ZERO_GRAD, Owner.OTHER):
            zeroed.zero_grad()

    def _zeroes_at(self, when: str) -> bool:
        """Megatron zeroes its buffer before the first micro-batch; steps in backward leave nothing to zero."""
        if self.main_gradients is not None:
            return when == "start"
        return self.optimizer is not None and getattr(self.setup.optimizer, "zero_grad", None) == when

    def _set_gradient_sync(self, last: bool) -> None:
        fsdp = self.setup.fsdp
        if self.main_gradients is not None:
            self.main_gradients.begin(last)
        if self.family is not None:
            self.family.begin(last)
        if fsdp is not None and fsdp.gradient_sync == "last":
            for communication in self.communications:
                for unit in communication.units:
                    unit.reduces = last

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with self.tape.autocast(self.setup.precision.compute if self.setup.precision.autocast else None):
            yield

    @contextmanager
    def _offload(self) -> Iterator[None]:
        """save_on_cpu around the whole forward where the setup asks for it."""
        if self.saved_on_host is None:
            yield
            return
        self.tape.hooks.append(SaveOnCpu(self.tape, self.saved_on_host))
        try:
            yield
        finally:
            self.tape.hooks.pop()

    def finish(self) -> None:
        """Break the cycles between modules and units, so that everything dies without the collector."""
        self.tape.main_gradients = self.tape.fp8 = None
        if self.family is not None:
            self.family.finish()
        for communication in self.communications:
            for unit in communication.units:
                for module in unit.modules:
                    module.hooks = None


def evaluated(config: ModelConfig) -> ModelConfig:
    """The model after model.eval(): no dropout, and Liger gives logits."""
    kernels = tuple(name for name in config.liger if name != "fused_linear_cross_entropy")
    return replace(config, dropout=0.0, liger=kernels)


def _tensors(slots: Iterable[Parameter]) -> list[Tensor]:
    return [slot.tensor for slot in slots if isinstance(slot.tensor, Tensor)]
