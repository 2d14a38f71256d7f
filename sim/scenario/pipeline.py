"""Pipeline stages: do schedule, chunks, placement and micro-batches fit the model and the rest of the scenario?"""

from __future__ import annotations

from sim.model.config import ChainConfig, ModelConfig
from sim.model.encoders import ENCODERS
from sim.scenario.checkpoint_section import CheckpointSection
from sim.scenario.document import Document
from sim.scenario.megatron_section import TensorSection
from sim.scenario.parallel import SPLITS_BACKWARD, Pipeline
from sim.scenario.schema import BatchSection, FsdpSection, PipelineSection

AnyModel = ModelConfig | ChainConfig

FIXED_CHUNKS = {"gpipe": 1, "1f1b": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}
"""Stages per rank of the schedules that do not leave them open."""
USUAL_CHUNKS = {"interleaved": 2, "breadth-first": 2}
RECEIVES_LATE = ("gpipe", "1f1b")
"""Schedules that receive right before they need it."""
CUT_IMPLEMENTATIONS = ("torchtitan", "nanogpt", "megatron")

PATH = ("parallel", "pipeline")


def resolve_pipeline(
    document: Document, section: PipelineSection, model: AnyModel, batch: BatchSection,
    checkpoint: CheckpointSection | None, fsdp: FsdpSection | None, tensor: TensorSection | None,
) -> Pipeline | None:  # fmt: skip
    """The pipeline of valid sections, or None with problems noted on the document."""
    before = len(document.problems)
    schedule = section.schedule
    chunks = section.virtual or FIXED_CHUNKS.get(schedule) or USUAL_CHUNKS.get(schedule, 1)
    if chunks != FIXED_CHUNKS.get(schedule, chunks):
        fixed = FIXED_CHUNKS[schedule]
        message = f"{schedule} has {fixed} stage{'s' * (fixed > 1)} per rank"
        other = ": interleaved takes any number" if fixed == 1 else ""
        document.problem((*PATH, "virtual"), message + other)
    _check_micro_batches(document, section, batch.accumulation)
    if isinstance(model, ModelConfig):
        _check_model(document, schedule, model, checkpoint, fsdp)
    _check_transfers(document, section, model, tensor)
    placement = _placement(document, section, section.degree * chunks, model.layers)
    if len(document.problems) > before or placement is None:
        return None
    waits = schedule == "1f1b" and _is_megatron(model)
    return Pipeline(
        degree=section.degree, schedule=schedule, chunks=chunks, placement=placement,
        overlap_p2p=not waits if section.overlap_p2p is None else section.overlap_p2p,
        p2p_sync=section.p2p_sync is not False,
        scatter_gather=section.scatter_gather and tensor is not None and tensor.degree > 1,
    )  # fmt: skip


def _is_megatron(model: AnyModel) -> bool:
    return isinstance(model, ModelConfig) and model.implementation == "megatron"


def _check_transfers(
    document: Document, section: PipelineSection, model: AnyModel, tensor: TensorSection | None
) -> None:
    """Megatron's ways to send, where they exist and make a difference."""
    overlap, sync, scatter = ((*PATH, name) for name in ("overlap_p2p", "p2p_sync", "scatter_gather"))
    if not _is_megatron(model):
        asked = (section.overlap_p2p is not None, section.p2p_sync is not None, section.scatter_gather)
        for path, given in zip((overlap, sync, scatter), asked):
            if given:
                document.problem(path, "only implementation megatron is written for it", show=False)
        return
    if section.overlap_p2p is not None and section.schedule != "interleaved":
        does = "always waits for" if section.schedule == "1f1b" else "never waits for"
        document.problem(overlap, f"is a choice of interleaved: {section.schedule} {does} what it sends", show=False)
    if section.p2p_sync is not None and section.schedule != "1f1b" and section.overlap_p2p is not False:
        document.warning(sync, "has no effect: compute goes on beside transfers")
    if section.scatter_gather and (tensor is None or tensor.degree == 1):
        document.warning(scatter, "has no effect without tensor parallelism")
    elif section.scatter_gather and tensor is not None and tensor.sequence_parallel:
        message = "with sequence parallelism a rank has its own tokens only, and sends no others anyway"
        document.problem(scatter, message, show=False)


def check_blocking(document: Document, section: PipelineSection) -> None:
    """A host that waits for its kernels waits for what they wait for: nothing may be asked for long before it can come."""
    if section.schedule not in RECEIVES_LATE:
        known = ", ".join(RECEIVES_LATE)
        message = f"{section.schedule} asks for transfers before it computes what they wait for: take one of {known}"
        document.problem(("host", "launch_blocking"), message)


def _check_micro_batches(document: Document, section: PipelineSection, count: int) -> None:
    """Interleaved schedules go in rounds of equal size; DualPipeV needs twice as many micro-batches as ranks."""
    path, ranks = ("batch", "accumulation"), section.degree
    if section.schedule in ("interleaved", "zb-h1"):
        rounds = max(1, count // ranks)
        if count < ranks and section.schedule == "interleaved":
            document.problem(path, f"interleaved needs at least as many micro-batches as ranks ({ranks})", show=False)
        elif count % rounds:
            message = f"{count} micro-batches cannot go in {rounds} equal rounds: take a multiple of {ranks}"
            document.problem(path, message, show=False)
    if section.schedule == "dualpipe-v" and count < 2 * ranks:
        document.problem(path, f"dualpipe-v needs at least {2 * ranks} micro-batches (2 per rank)", show=False)


def _check_model(
    document: Document,
    schedule: str,
    model: ModelConfig,
    checkpoint: CheckpointSection | None,
    fsdp: FsdpSection | None,
) -> None:
    """What cannot be cut, and what a split backward cannot have around it."""
    if model.family in ENCODERS and (model.family, model.implementation) != ("bert", "megatron"):
        message = f"{model.implementation}'s models of the {model.family} family are not cut into stages"
        document.problem(PATH, message, show=False)
    elif model.implementation not in CUT_IMPLEMENTATIONS:
        known = ", ".join(CUT_IMPLEMENTATIONS)
        message = f"{model.implementation} models are not cut into stages: take one of {known}"
        document.problem(("model", "implementation"), message, show=False)
    if schedule not in SPLITS_BACKWARD:
        return
    for other, name in ((checkpoint, "checkpoint"), (fsdp, "fsdp")):
        if other is not None:
            document.problem((*PATH, "schedule"), f"splits backwards, which is not modelled together with {name}")


def _placement(document: Document, section: PipelineSection, stages: int, layers: int) -> tuple[int, ...] | None:
    """Layers of every stage."""
    path = (*PATH, "placement")
    given = section.placement
    if isinstance(given, tuple):
        if len(given) != stages:
            document.problem(path, f"{len(given)} entries, but there are {stages} stages", show=False)
        elif sum(given) != layers:
            document.problem(path, f"{sum(given)} layers, but the model has {layers}", show=False)
        return given
    if stages > layers:
        document.problem((*PATH, "degree"), f"{stages} stages are more than the model's {layers} layers", show=False)
        return None
    return balanced(layers, stages)


def balanced(layers: int, stages: int) -> tuple[int, ...]:
    """Equal numbers; what is left over goes to the second stage and on: the first holds most micro-batches, and the
    last has the head."""
    left = layers % stages
    extra = [*range(1, stages), 0][:left]
    return tuple(layers // stages + (stage in extra) for stage in range(stages))
