"""The training script of one pipeline rank: its stages of the model, a step by the schedule, then clip and optimizer."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

from sim.model.build import build_model
from sim.model.calls import Tensor as ModelTensor
from sim.model.config import ModelConfig
from sim.model.language_model import LanguageModel
from sim.model.module import Parameter
from sim.program.kernels import ITEM_BYTES, Collective
from sim.program.program import ALL_REDUCE, COMPUTE, Owner, Phase, Program
from sim.runtime.extend import NotPeriodic
from sim.runtime.pipeline import PipelineRank, Stage, Wire
from sim.runtime.recorded import recorded
from sim.runtime.recorder import Recorder
from sim.runtime.replay import stampable
from sim.runtime.schedules import stages_of
from sim.runtime.sharding.fsdp2 import finish_backward
from sim.runtime.tensor import Tensor
from sim.runtime.train import TrainingRun
from sim.runtime.unfold import unfold
from sim.scenario.setup import Setup


def record_pipeline(
    setup: Setup, rank: int, steps: int = 2, fail_at: int | None = None, stamps: bool = True, folds: bool = True
) -> Program:
    """Everything that pipeline rank `rank` issues in `steps` steps; it stands for its symmetric peers.

    `folds`: record the steady state's first periods only, and put the others in where they are alike (same program,
    sooner).
    """
    assert setup.pipeline is not None
    keeps = setup.checkpoint is not None and setup.checkpoint.keep_micro_batches  # some are not like the others
    run = PipelineTraining(setup, Recorder(fail_at), rank, folds and fail_at is None and not keeps)
    buckets = setup.data is not None and setup.data.overlap and setup.data.degree > 1  # they know no layers
    alike = stampable(setup) and not setup.pipeline.splits_backward and not buckets
    program = recorded(run, steps, stamps and fail_at is None and alike)
    try:
        return unfold(program, run.pipeline.folded)
    except NotPeriodic:
        return record_pipeline(setup, rank, steps, fail_at, stamps, folds=False)


class PipelineTraining(TrainingRun):
    """One rank's script. Tokens and targets of all micro-batches are loaded at once, on every rank."""

    def __init__(self, setup: Setup, recorder: Recorder, rank: int, folds: bool = False) -> None:
        assert setup.pipeline is not None
        numbers, models = build_stages(setup, rank)
        super().__init__(setup, recorder, models)
        self.slots = list({id(named[1]): named for named in self.slots}.values())
        self.tensors = list({id(named[1]): named for named in self.tensors}.values())
        stages: dict[int, Stage] = {n: LanguageModelStage(self, index) for index, n in enumerate(numbers)}
        last = setup.pipeline.degree * setup.pipeline.chunks - 1
        self.holds_last = last in numbers
        self.pipeline = PipelineRank(
            self.tape, setup.pipeline, setup.batch.accumulation, rank, stages, wire_of(setup, self.config),
            setup.checkpoint.keep_micro_batches if setup.checkpoint is not None else 0, folds,
            setup.offload if setup.offload is not None and setup.offload.what == "stage_activations" else None,
        )  # fmt: skip

    def step(self, number: int) -> None:
        mark, setup = self.recorder.mark, self.setup
        self._load_data(setup.batch.accumulation)
        mark(f"s{number}.data")
        if self._zeroes_at("start"):
            self._zero_grad()
        if self.context is not None:
            self.context.enter(self)
        self.pipeline.run(lambda part: mark(f"s{number}.{part}"))
        if self.context is not None:
            self.context.leave(self)
        if self.holds_last and "loss" in setup.host.sync:
            self.recorder.sync(self.recorder.record(COMPUTE))
        self._finish_gradients()
        with self.tape.phase(Phase.BACKWARD, Owner.OTHER):
            self._reduce_tied_gradient()
        self._optimize(number)
        mark(f"s{number}.end")

    def finish(self) -> None:
        super().finish()
        self.pipeline.stages.clear()

    def micro_batch_of(self, loaded: ModelTensor | None) -> Tensor:
        """A view of one micro-batch's tokens or targets."""
        assert loaded is not None
        return Tensor.of(loaded).alias((self.setup.batch.micro_batch, self.setup.local_tokens))

    def _reduce_tied_gradient(self) -> None:
        """Embedding and head are one parameter on two ranks: both gradients are added up."""
        assert self.setup.pipeline is not None
        if not self.config.tied_embeddings or self.setup.pipeline.folded or self.setup.pipeline.degree == 1:
            return
        for model in self.models:
            for slot in filter(None, (embedding_of(model), head_of(model))):
                tensor = slot.tensor
                if isinstance(tensor, Tensor) and self.main_gradients is not None:
                    dtype = self.main_gradients.dtype
                    size_bytes = tensor.elements * ITEM_BYTES[dtype]
                    self._all_reduce(Collective("all_reduce", size_bytes, "embedding", 2, dtype))
                elif isinstance(tensor, Tensor) and tensor.grad is not None:
                    gradient = tensor.grad
                    self._all_reduce(Collective("all_reduce", gradient.bytes, "embedding", 2, gradient.dtype))

    def _all_reduce(self, collective: Collective) -> None:
        self.recorder.stream_waits_stream(ALL_REDUCE, COMPUTE)
        self.recorder.collective(collective, ALL_REDUCE)
        self.recorder.stream_waits_stream(COMPUTE, ALL_REDUCE)

    def _norm_is_summed(self) -> None:
        """The gradient norm is that of all stages."""
        assert self.setup.pipeline is not None
        super()._norm_is_summed()
        if self.setup.pipeline.degree > 1:
            self._all_reduce(Collective("all_reduce", 4, "pp", self.setup.pipeline.degree, "fp32"))


class LanguageModelStage:
    """A model's part as a stage of the run."""

    def __init__(self, run: PipelineTraining, index: int) -> None:
        self.run = run
        self.index = index
        model = run.models[index]
        self.is_first, self.is_last = embedding_of(model) is not None, head_of(model) is not None

    def first_input(self, micro_batch: int) -> Tensor | None:
        return None

    def forward(self, hidden: Tensor | None, micro_batch: int) -> tuple[Tensor, Any]:
        """The last stage keeps its logits until the backward, as a PipelineStage keeps its output."""
        run, model = self.run, self.run.models[self.index]
        given = hidden if hidden is not None else run.micro_batch_of(run.tokens)
        with run._autocast(), run._offload(), run.tape.phase(Phase.FORWARD, Owner.ACTIVATION):
            if not self.is_last:
                return Tensor.of(model.stage_output(given)), None
            loss, logits = model.compute_loss(given, run.micro_batch_of(run.targets))
            return Tensor.of(loss), logits

    def before_backward(self, is_last: bool) -> None:
        """Megatron's gradients are reduced in a stage's last backward. Under FSDP2 none reduces, and gathered parameters
        stay."""
        if self.run.main_gradients is not None:
            self.run.main_gradients.begin(is_last)
        if self.run.communications:
            self._synchronize(False)

    def after_backwards(self) -> None:
        """FSDP2's gradients of all micro-batches are reduced after them, unit by unit, and parameters dropped (torch's
        perform_reduce_grad)."""
        if self.run.communications:
            self._synchronize(True)
            with self.run.tape.phase(Phase.BACKWARD, Owner.GRADIENT):
                finish_backward(self.run.communications[self.index])

    def _synchronize(self, reduces: bool) -> None:
        """set_is_last_backward, set_requires_gradient_sync, set_reshard_after_backward."""
        communication = self.run.communications[self.index]
        communication.is_last_backward = reduces
        for unit in communication.units:
            unit.reduces, unit.stays_gathered = reduces, True


def build_stages(setup: Setup, rank: int) -> tuple[list[int], list[LanguageModel]]:
    """Numbers and parts of the stages that a rank holds. Where it holds both ends, tied embeddings are one parameter."""
    pipeline, config = setup.pipeline, setup.model
    assert pipeline is not None and isinstance(config, ModelConfig)
    begins = list(accumulate(pipeline.placement, initial=0))
    last = len(pipeline.placement) - 1
    numbers = stages_of(rank, pipeline.degree, pipeline.chunks, pipeline.folded)
    models = []
    for number in numbers:
        stage = stage_config(config, begins[number], pipeline.placement[number])
        model = build_model(stage, setup.tensor, setup.expert, setup.context)
        model.become_stage(begins[number], number == 0, number == last)
        models.append(model)
    if config.tied_embeddings and last > 0 and numbers[0] == 0 and numbers[-1] == last:
        vars(models[-1])[models[-1].last_parts[-1]].weight = embedding_of(models[0])
    return numbers, models


def stage_config(config: ModelConfig, first_layer: int, layers: int) -> ModelConfig:
    """`layers` of the model from `first_layer` on; of 8-bit ones those at either end of the model are in 16 bit."""
    fp8 = config.fp8
    if fp8 is not None:
        last = first_layer + layers - (config.layers - fp8.last)
        fp8 = replace(fp8, first=max(0, fp8.first - first_layer), last=max(0, last))
    return replace(config, layers=layers, first_layer=first_layer, fp8=fp8)


def embedding_of(model: LanguageModel) -> Parameter | None:
    """The word embedding of the first stage."""
    part = vars(model)[model.first_parts[0]]
    return None if part is None else part.parameters()[0]


def head_of(model: LanguageModel) -> Parameter | None:
    """The head of the last stage."""
    part = vars(model)[model.last_parts[-1]]
    return None if part is None else part.weight


def wire_of(setup: Setup, config: ModelConfig) -> Wire:
    """Hidden states [B, S, H], Megatron's [S, B, H] or its share of tokens, in the dtype of the residual stream."""
    batch, precision = setup.batch, setup.precision
    megatron = config.implementation == "megatron"
    length = setup.local_tokens // setup.tensor.degree if setup.tensor.splits_tokens else setup.local_tokens
    tokens = (length, batch.micro_batch) if megatron else (batch.micro_batch, length)
    dtype = precision.parameters if setup.fsdp is None or precision.autocast else precision.compute
    shape = (*tokens, config.hidden)
    scatters = setup.pipeline is not None and setup.pipeline.scatter_gather
    shares = setup.tensor.degree if scatters and prod(shape) % setup.tensor.degree == 0 else 1
    return Wire(shape, dtype, kept=not megatron, shares=shares)
