"""From a document to `Setup` objects: every name looked up, every section completed, all problems collected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as FilePath

from sim.model.config import ModelConfig
from sim.model.experts import ExpertParallel
from sim.model.shard.tensor import TensorParallel
from sim.scenario.checkpoint_section import CheckpointSection, RegionSection
from sim.scenario.checkpointing import check_checkpoint
from sim.scenario.compile_section import CompileSection
from sim.scenario.compiling import check_asynchronous, check_compile, resolve_compile
from sim.scenario.consistency import (
    check_allocator,
    check_batch,
    check_fsdp,
    check_grad_scaler,
    check_loss_chunks,
    check_mode,
    check_precision,
    check_under_pipeline,
    check_version,
)
from sim.scenario.context import check_context, resolve_context
from sim.scenario.document import Document
from sim.scenario.dump import dumped
from sim.scenario.encoder_checks import check_stacks, check_weights, with_lengths
from sim.scenario.experts import check_experts
from sim.scenario.family_checks import check_families, check_zero_precision, resolve_zero
from sim.scenario.float8 import check_eager_float8, check_float8
from sim.scenario.fp8 import check_fp8_beside, check_fp8_checkpoint, with_fp8
from sim.scenario.liger import check_liger
from sim.scenario.lora import check_first_stage, check_trained, with_lora
from sim.scenario.machine import resolve_cluster, resolve_mesh
from sim.scenario.offload import OffloadSection, check_offload, resolve_offload
from sim.scenario.optimizer_checks import check_optimizer
from sim.scenario.parallel import DataParallel, Ddp, Fsdp, Fsdp1
from sim.scenario.parallel_checks import check_tensor_and_data
from sim.scenario.pipeline import check_blocking, resolve_pipeline
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.problems import Problem, ScenarioError
from sim.scenario.profiles import check_names, resolve_profile
from sim.scenario.resolve_model import resolve_model
from sim.scenario.schema import (
    BatchSection,
    HostSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PipelineSection,
)
from sim.scenario.sections import EXPECTED, Sections, strategies_of, valid_sections
from sim.scenario.setup import Batch, Checkpoint, Host, Optimizer, Precision, Region, Scenario, Setup
from sim.scenario.tiling import check_tiles


def resolve(document: Document, name: str, path: FilePath | None, overrides: tuple[str, ...] = ()) -> Scenario:
    """The scenario in a document. Raises ScenarioError with all problems; warnings go into the scenario."""
    text = dumped(document)
    setups: list[Setup] = []
    problems, warnings = list(document.problems), list(document.warnings)
    document.problems.clear()
    description = ""
    for strategy, complete in strategies_of(document):
        sections = valid_sections(complete)
        setup = _setup(strategy, complete, sections)
        setups += [setup] if setup else []
        problems += complete.problems
        warnings += complete.warnings
        description = sections.get("description") or ""
    problems += document.problems
    if problems:
        raise ScenarioError(problems)
    texts = dict.fromkeys(_warning(warning) for warning in warnings)
    return Scenario(
        name=name,
        path=path,
        description=description,
        strategies=tuple(setups),
        warnings=tuple(texts),
        overrides=overrides,
        text=text,
    )


def _setup(name: str, document: Document, sections: Sections) -> Setup | None:
    """One strategy, or None with problems noted on the document; as much as possible is checked in any case."""
    is_chain = isinstance(document.value(("model", "chain")), dict)
    parallel = sections.get("parallel") or ParallelSection()
    fsdp = parallel.fsdp
    pipeline: PipelineSection | None = parallel.pipeline
    checkpoint: CheckpointSection | None = sections.get("checkpoint")
    precision: PrecisionSection | None = sections.get("precision")
    model = resolve_model(document, sections)
    if precision and isinstance(model, ModelConfig):
        section: ModelSection = sections.get("model")
        model = with_lora(document, section.lora, model, fsdp is not None, precision.parameters, precision.compute)
        if section.input_gradients is None and checkpoint and model.implementation == "transformers":
            model = replace(model, input_gradients=True)
        check_trained(document, model, sections.get("mode") or "train")
        if sections.whole("parallel"):
            model = with_fp8(document, precision, parallel, model, sections.get("mode") or "train")
    cluster = resolve_cluster(document, sections, parallel, is_chain)
    batch = _batch(document, sections, is_chain)
    batch = with_lengths(document, batch, model) if batch and sections.whole("batch") else batch
    mesh = resolve_mesh(document, parallel, cluster) if cluster and sections.whole("cluster", "parallel") else None
    if sections.get("torch"):
        check_version(document, sections.get("torch"))
    check_names(document, sections.get("profile"), sections.get("host"), cluster)
    if fsdp:
        check_fsdp(document, fsdp, model, sections.get("torch"))
    if sections.whole("parallel"):
        check_tensor_and_data(document, parallel, model, batch)
        seq_len = batch.seq_len if batch else None
        check_context(document, parallel, model, seq_len, precision.compute if precision else "bf16")
        if model:
            check_experts(document, parallel, model)
            check_loss_chunks(document, parallel, model)
        check_families(document, parallel, model, sections)
    if batch and model:
        check_batch(document, batch, model)
    if model:
        compute = precision.compute if precision else ""
        check_stacks(document, checkpoint, sections.get("offload"), model, compute)
    if checkpoint and model:
        check_weights(document, checkpoint, model)
        check_checkpoint(document, checkpoint, model, precision.compute if precision else "bf16")
        if checkpoint.keep_micro_batches and sections.whole("parallel") and pipeline is None:
            document.problem(("checkpoint", "keep_micro_batches"), "without parallel.pipeline none is in flight")
    if sections.whole("parallel", "optimizer"):
        check_tiles(document, model, sections)
    check_mode(document, sections.get("mode") or "train", checkpoint, model)
    if optimizer := sections.get("optimizer"):
        check_optimizer(document, optimizer, batch, precision, parallel if sections.whole("parallel") else None)
    stages = None
    if pipeline and model and batch and sections.whole("parallel"):
        stages = resolve_pipeline(document, pipeline, model, batch, checkpoint, fsdp, parallel.tensor)
        if stages and isinstance(model, ModelConfig):
            check_first_stage(document, model, stages.placement[0])
    if pipeline:
        if (host := sections.get("host")) is not None and host.launch_blocking:
            check_blocking(document, pipeline)
        mode = sections.get("mode") or "train"
        check_under_pipeline(document, checkpoint, sections.get("optimizer"), mode)
    offload: OffloadSection | None = sections.get("offload")
    if offload and model and sections.whole("checkpoint"):
        check_offload(document, offload, checkpoint is not None, model, pipeline.schedule if pipeline else None)
    compiled: CompileSection | None = sections.get("compile")
    if compiled is not None and model and sections.whole("checkpoint", "parallel"):
        check_compile(document, compiled, model, cluster, precision, checkpoint, parallel, offload)
    if precision and model and sections.whole("compile", "parallel", "precision"):
        check_liger(document, model, precision, compiled is not None)
    if precision and sections.whole("compile", "parallel", "precision"):
        check_float8(document, precision, compiled is not None, cluster, parallel.fsdp)
        if precision.float8 is not None and compiled is None and model and batch and sections.whole("checkpoint"):
            check_eager_float8(document, precision, model, checkpoint, parallel, batch.micro_batch * batch.seq_len)
        check_asynchronous(document, parallel, compiled is not None)
        check_fp8_beside(document, precision, cluster)
        check_grad_scaler(document, precision, parallel, sections.get("optimizer"), sections.get("mode") or "train")
        check_fp8_checkpoint(document, precision, checkpoint)
    if precision and cluster and sections.whole("precision", "parallel") and not is_chain:
        if parallel.zero is not None:
            check_zero_precision(document, precision)
        check_precision(document, precision, fsdp or parallel.fsdp1 or parallel.zero, cluster, model)
    if sections.whole("torch", "allocator"):
        check_allocator(document, sections.get("allocator"), sections.get("torch"))
    if document.problems or not (model and cluster and batch and mesh and precision):
        return None
    return Setup(
        name=name,
        torch=sections.get("torch"),
        model=model,
        cluster=cluster,
        mesh=mesh,
        batch=Batch(**batch.model_dump()),
        precision=_precision(precision, parallel),
        optimizer=_optimizer(sections.get("optimizer")),
        checkpoint=_checkpoint(checkpoint, model.layers),
        fsdp=_fsdp(parallel),
        allocator=sections.get("allocator"),
        host=_host(sections.get("host")),
        profile=resolve_profile(document, sections.get("profile")),
        mode=sections.get("mode"),
        pipeline=stages,
        gemm_efficiency=sections.get("gemm_efficiency"),
        attention_kernel=sections.get("attention_kernel"),
        tensor=TensorParallel(**parallel.tensor.model_dump()) if parallel.tensor else TensorParallel(),
        context=resolve_context(parallel.context, model),
        expert=ExpertParallel(mesh.degree("ep"), mesh.degree("etp")),
        data=_data(parallel),
        ddp=None if parallel.ddp is None else Ddp(**parallel.ddp.model_dump()),
        zero=None if parallel.zero is None else resolve_zero(parallel.zero, parallel.context),
        fsdp1=None if parallel.fsdp1 is None else Fsdp1(**parallel.fsdp1.model_dump()),
        offload=resolve_offload(offload, model.layers),
        compile=resolve_compile(compiled),
    )


def _batch(document: Document, sections: Sections, is_chain: bool) -> BatchSection | None:
    if "batch" not in sections.by_name:
        return None
    batch: BatchSection | None = sections.get("batch")
    if batch is None and is_chain:
        return BatchSection(micro_batch=1, seq_len=1)
    if batch is None:
        document.problem(("batch",), EXPECTED["missing"], show=False)
    return batch


def _precision(section: PrecisionSection, parallel: ParallelSection) -> Precision:
    autocast = section.autocast
    if autocast is None:
        alone = parallel.fsdp is None and parallel.fsdp1 is None and parallel.zero is None
        autocast = alone and section.compute != section.parameters
    return Precision(**{**section.model_dump(exclude={"fp8", "fp4", "fp8_edge_layers"}), "autocast": autocast})


def _optimizer(section: OptimizerSection | None) -> Optimizer | None:
    return None if section is None else Optimizer(**section.model_dump())


def _checkpoint(section: CheckpointSection | None, model_layers: int) -> Checkpoint | None:
    if section is None:
        return None
    fields = {name: getattr(section, name) for name in CheckpointSection.model_fields if name not in ("save", "layers")}
    choices = tuple(None if choice is None else _region(choice) for choice in section.layers)
    layers = choices * (model_layers // len(choices)) if choices else ()
    return Checkpoint(**fields, save=tuple(section.save), layers=layers)


def _region(section: RegionSection) -> Region:
    return Region(**{**section.model_dump(), "save": tuple(section.save)})


def _data(parallel: ParallelSection) -> DataParallel | None:
    """Megatron's training loop: asked for, or what tensor or context parallelism without FSDP runs in."""
    context = parallel.context.degree if parallel.context is not None else 1
    if parallel.data is not None:
        fields = parallel.data.model_dump()
        return DataParallel(**{**fields, "degree": parallel.data.degree * context})
    loop = (parallel.tensor or parallel.context) and not (parallel.fsdp or parallel.zero)
    return DataParallel(degree=context) if loop else None


def _fsdp(parallel: ParallelSection) -> Fsdp | None:
    if parallel.fsdp is None:
        return None
    context = parallel.context.degree if parallel.context is not None else 1
    return Fsdp(**{**parallel.fsdp.model_dump(), "degree": parallel.fsdp.degree * context})


def _host(section: HostSection) -> Host:
    return Host(framework=section.framework, sync=tuple(section.sync), launch_blocking=section.launch_blocking)


def _warning(problem: Problem) -> str:
    place = f"{problem.file} {problem.place}".strip()
    return f"{place}: {problem.path} {problem.text}"
