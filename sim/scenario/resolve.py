"""From a document to `Setup` objects: every name looked up, every section completed, all problems collected."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from sim.hardware.catalogue import Cluster, UnknownGpu, find_gpu, gpu_names, make_cluster
from sim.hardware.mesh import Mesh, MeshError
from sim.model.catalogue import (
    Fields,
    build_model,
    overridable_fields,
    preset_shapes,
)
from sim.model.config import ChainConfig, ModelConfig
from sim.model.experts import ExpertParallel
from sim.model.faults import ModelError
from sim.model.huggingface import HuggingFaceConfig, read_huggingface_config
from sim.model.shard.tensor import TensorParallel
from sim.scenario.chain import resolve_chain
from sim.scenario.checkpoint_section import CheckpointSection, RegionSection
from sim.scenario.checkpointing import check_checkpoint
from sim.scenario.compile_section import CompileSection
from sim.scenario.compiling import check_compile, check_float8, resolve_compile
from sim.scenario.consistency import (
    check_allocator,
    check_batch,
    check_fsdp,
    check_megatron_parallel,
    check_mode,
    check_names,
    check_optimizer,
    check_precision,
    check_under_pipeline,
    check_version,
)
from sim.scenario.context import check_context, resolve_context
from sim.scenario.document import MISSING, Document
from sim.scenario.dump import dumped
from sim.scenario.encoder_checks import check_stacks, check_weights, with_lengths
from sim.scenario.experts import check_experts, expert_mesh
from sim.scenario.family_checks import check_families, check_zero_precision, resolve_zero
from sim.scenario.load import OVERRIDES
from sim.scenario.lora import check_first_stage, check_trained, with_lora
from sim.scenario.offload import OffloadSection, check_offload, resolve_offload
from sim.scenario.pipeline import resolve_pipeline
from sim.scenario.problems import Problem, ScenarioError, shown
from sim.scenario.schema import (
    BatchSection,
    ClusterSection,
    HostSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PipelineSection,
    PrecisionSection,
)
from sim.scenario.section import Section
from sim.scenario.sections import EXPECTED, Sections, strategies_of, valid_sections
from sim.scenario.setup import (
    Batch,
    Checkpoint,
    DataParallel,
    Ddp,
    Fsdp,
    Fsdp1,
    Host,
    Optimizer,
    Precision,
    Region,
    Scenario,
    Setup,
)

CHAIN_GPU = "h100-sxm-80gb"
"""What a chain runs on where no cluster is given; its times are given, so only the memory matters."""


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
    model = _model(document, sections)
    if precision and isinstance(model, ModelConfig):
        section: ModelSection = sections.get("model")
        model = with_lora(document, section.lora, model, fsdp is not None, precision.parameters, precision.compute)
        if section.input_gradients is None and checkpoint and model.implementation == "transformers":
            model = replace(model, input_gradients=True)
        check_trained(document, model, sections.get("mode") or "train")
    cluster = _cluster(document, sections, parallel, is_chain)
    batch = _batch(document, sections, is_chain)
    batch = with_lengths(document, batch, model) if batch and sections.whole("batch") else batch
    mesh = _mesh(document, parallel, cluster) if cluster and sections.whole("cluster", "parallel") else None
    if sections.get("torch"):
        check_version(document, sections.get("torch"))
    check_names(document, sections.get("profile"), sections.get("host"), cluster)
    if fsdp:
        check_fsdp(document, fsdp, model, sections.get("torch"))
    if sections.whole("parallel"):
        check_megatron_parallel(document, parallel, model, batch)
        seq_len = batch.seq_len if batch else None
        check_context(document, parallel, model, seq_len, precision.compute if precision else "bf16")
        if model:
            check_experts(document, parallel, model)
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
    check_mode(document, sections.get("mode") or "train", checkpoint, model)
    if optimizer := sections.get("optimizer"):
        check_optimizer(document, optimizer, batch, precision, parallel if sections.whole("parallel") else None)
    stages = None
    if pipeline and model and batch and sections.whole("parallel"):
        stages = resolve_pipeline(document, pipeline, model, batch, checkpoint, fsdp, parallel.tensor)
        if stages and isinstance(model, ModelConfig):
            check_first_stage(document, model, stages.placement[0])
    if pipeline:
        mode = sections.get("mode") or "train"
        check_under_pipeline(document, checkpoint, sections.get("optimizer"), mode, model)
    offload: OffloadSection | None = sections.get("offload")
    if offload and model and sections.whole("checkpoint"):
        check_offload(document, offload, checkpoint is not None, model, pipeline.schedule if pipeline else None)
    compiled: CompileSection | None = sections.get("compile")
    if compiled is not None and model and sections.whole("checkpoint", "parallel"):
        check_compile(document, compiled, model, cluster, precision, checkpoint, parallel, offload)
    if precision and sections.whole("compile", "parallel", "precision"):
        check_float8(document, precision, compiled is not None, cluster, parallel.fsdp)
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
        profile=sections.get("profile"),
        mode=sections.get("mode"),
        pipeline=stages,
        gemm_efficiency=sections.get("gemm_efficiency"),
        attention_kernel=sections.get("attention_kernel"),
        tensor=TensorParallel(**parallel.tensor.model_dump()) if parallel.tensor else TensorParallel(),
        context=resolve_context(parallel.context, model),
        expert=ExpertParallel(mesh.degree("ep"), mesh.degree("etp")),
        data=_data(parallel),
        ddp=None if parallel.ddp is None else Ddp(**parallel.ddp.model_dump()),
        zero=None if parallel.zero is None else resolve_zero(parallel.zero),
        fsdp1=None if parallel.fsdp1 is None else Fsdp1(**parallel.fsdp1.model_dump()),
        offload=resolve_offload(offload, model.layers),
        compile=resolve_compile(compiled),
    )


def _model(document: Document, sections: Sections) -> ModelConfig | ChainConfig | None:
    section: ModelSection | None = sections.get("model")
    if section is None:
        return None
    given = [name for name in ("preset", "config", "chain") if getattr(section, name) is not None]
    if len(given) != 1:
        if sections.whole("model"):
            message = f"exactly one of preset, config and chain is expected, not {' and '.join(given) or 'none'}"
            document.problem(("model",), message, show=False)
        return None
    if section.chain is not None:
        return resolve_chain(document, section, section.chain)
    read: HuggingFaceConfig | None = None
    try:
        if section.config is not None:
            file = _beside(document, section.config)
            name = file.parent.name if file.name == "config.json" else file.stem
            read = read_huggingface_config(file)
            shapes = read.shapes
        else:
            name = str(section.preset)
            shapes = preset_shapes(name)
    except ModelError as error:
        _note_faults(document, error)
        return None
    overrides = {field: value for field in overridable_fields() if (value := _override(section, field)) is not None}
    try:
        model = build_model(name, shapes, section.implementation, overrides)
    except ModelError as error:
        _note_faults(document, error)
        return _build_without(error, name, shapes, section.implementation, overrides)
    batch: BatchSection | None = sections.get("batch")
    for message in read.not_modelled(model, batch.seq_len if batch else None) if read else ():
        document.warning(("model", "config"), message)
    return model


def _override(section: ModelSection, field: str) -> Any:
    """A field's value, or what is given of a nested section."""
    value = getattr(section, field)
    return value.model_dump(exclude_none=True) if isinstance(value, Section) else value


def _note_faults(document: Document, error: ModelError) -> None:
    """Blames the field; where nobody has written it, its value (a preset's, a config.json's) is told all the same."""
    for fault in error.faults:
        path = ("model", *fault.field.split("."))
        written = document.value(path) is not MISSING or fault.value is None
        message = fault.message if written else f"{shown(fault.value)}: {fault.message}"
        document.problem(path, message, allowed=fault.allowed)


def _build_without(
    error: ModelError, name: str, shapes: Fields, implementation: str | None, overrides: Fields
) -> ModelConfig | None:
    """The model without its faulty fields, for the checks that remain."""
    faulty = {fault.field.partition(".")[0] for fault in error.faults}
    good = {field: value for field, value in overrides.items() if field not in faulty}
    with suppress(ModelError):
        return build_model(name, shapes, None if "implementation" in faulty else implementation, good)
    return None


def _beside(document: Document, config: str) -> FilePath:
    """A path that is relative to the file that says it; to the working directory from --set."""
    origin = document.origin(("model", "config"))
    folder = FilePath() if origin.file == OVERRIDES else FilePath(origin.file).parent
    return folder / os.path.expanduser(config)


def _cluster(document: Document, sections: Sections, parallel: ParallelSection, is_chain: bool) -> Cluster | None:
    if "cluster" not in sections.by_name:
        return None
    section: ClusterSection | None = sections.get("cluster")
    if section is None and is_chain:
        section = ClusterSection(gpu=CHAIN_GPU, gpus_per_node=1)
    if section is None:
        document.problem(("cluster",), EXPECTED["missing"], show=False)
        return None
    try:
        gpu = find_gpu(section.gpu)
    except UnknownGpu:
        document.problem(("cluster", "gpu"), "", allowed=gpu_names())
        return None
    alone = parallel == ParallelSection() and section.nodes == 1
    return make_cluster(
        gpu,
        gpus_per_node=section.gpus_per_node or (1 if alone else None),
        nodes=section.nodes,
        network_bytes_per_s=section.network,
        usable_memory_bytes=section.usable_memory,
        context_bytes=section.context_memory,
        communicator_bytes=section.communicator_memory,
        host_memory_bytes=section.host_memory,
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


def _mesh(document: Document, parallel: ParallelSection, cluster: Cluster) -> Mesh | None:
    """Dimensions, outermost first; the ranks of a tensor-parallel group lie side by side, those of a context-parallel
    group next (Megatron's order tp-cp-dp-pp, torchtitan's pp, dp, cp, tp)."""
    fsdp, data, tensor, pipeline = parallel.fsdp, parallel.data, parallel.tensor, parallel.pipeline
    if parallel == ParallelSection() and cluster.gpus > 1:
        advice = f"nothing shares the work of {cluster.gpus} GPUs: add fsdp: {{degree: {cluster.gpus}}}, or use one GPU"
        document.problem(("parallel",), advice, show=False)
        return None
    dimensions = [] if pipeline is None else [("pp", pipeline.degree)]
    if (sharded := fsdp or parallel.fsdp1) is not None:
        dimensions += [("replicate", sharded.replicas)] if sharded.replicas > 1 else []
        dimensions.append(("fsdp", sharded.degree))
    if (replicated := parallel.ddp or parallel.zero) is not None:
        dimensions.append(("dp", replicated.degree))
    if data is not None and (data.degree > 1 or tensor is None):
        dimensions.append(("dp", data.degree))
    if parallel.context is not None:
        dimensions.append(("cp", parallel.context.degree))
    if tensor is not None:
        dimensions.append(("tp", tensor.degree))
    try:
        mesh = Mesh(tuple(dimensions), cluster.gpus_per_node, cluster.gpus)
    except MeshError as error:
        document.problem(("parallel",), str(error), show=False)
        return None
    if fsdp is not None or not (parallel.expert or parallel.context or data or tensor):
        return mesh
    experts = expert_mesh(document, parallel.expert, mesh, tensor.degree if tensor is not None else 1)
    return None if experts is None else replace(mesh, experts=experts)


def _precision(section: PrecisionSection, parallel: ParallelSection) -> Precision:
    autocast = section.autocast
    if autocast is None:
        alone = parallel.fsdp is None and parallel.fsdp1 is None and parallel.zero is None
        autocast = alone and section.compute != section.parameters
    return Precision(**{**section.model_dump(), "autocast": autocast})


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
    loop = (parallel.tensor is not None or parallel.context is not None) and parallel.fsdp is None
    return DataParallel(degree=context) if loop else None


def _fsdp(parallel: ParallelSection) -> Fsdp | None:
    if parallel.fsdp is None:
        return None
    context = parallel.context.degree if parallel.context is not None else 1
    return Fsdp(**{**parallel.fsdp.model_dump(), "degree": parallel.fsdp.degree * context})


def _host(section: HostSection) -> Host:
    return Host(framework=section.framework, sync=tuple(section.sync))


def _warning(problem: Problem) -> str:
    place = f"{problem.file} {problem.place}".strip()
    return f"{place}: {problem.path} {problem.text}"
