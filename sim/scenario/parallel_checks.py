"""Tensor parallelism, and Megatron's data parallelism: whose code is written for them, and equal shares."""

from __future__ import annotations

from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.document import Document
from sim.scenario.parallel import SPLITS_BACKWARD
from sim.scenario.schema import BatchSection, ParallelSection


def _expert_ranks(parallel: ParallelSection) -> int:
    """Ranks that hold one copy of all experts of a layer."""
    if parallel.expert is None:
        return 1
    tensor = parallel.tensor.degree if parallel.tensor is not None else 1
    return parallel.expert.degree * (parallel.expert.tensor or tensor)


def check_tensor_and_data(
    document: Document, parallel: ParallelSection, model: ModelConfig | ChainConfig | None, batch: BatchSection | None
) -> None:
    """Code that was written for it, and shares without remainder."""
    tensor = parallel.tensor
    if parallel.data is not None and parallel.fsdp is not None:
        document.problem(("parallel", "data"), "fsdp is data parallelism already: leave one out", show=False)
    if model is None:
        return
    code = getattr(model, "implementation", "")
    if parallel.data is not None and code != "megatron":
        document.problem(("parallel", "data"), "only implementation megatron is written for it", show=False)
        return
    _check_data(document, parallel)
    if tensor is not None and code not in ("megatron", "torchtitan"):
        message = "only implementations megatron and torchtitan are written for it"
        document.problem(("parallel", "tensor"), message, show=False)
        return
    if tensor is None or isinstance(model, ChainConfig):
        return
    if code == "torchtitan":
        _check_titan_tensor(document, parallel, model)
    if tensor.asynchronous and code != "torchtitan":
        document.problem(("parallel", "tensor", "asynchronous"), f"is torchtitan's: {code} has its own overlap")
    if tensor.sequence_parallel and model.family == "bert":
        path = ("parallel", "tensor", "sequence_parallel")
        document.problem(path, "is not modelled for BERT, whose heads are whole on every rank", show=False)
    if not tensor.async_all_reduce and (tensor.sequence_parallel or tensor.degree == 1):
        why = "sequence parallelism reduces and scatters" if tensor.sequence_parallel else "one rank sums nothing"
        document.warning(("parallel", "tensor", "async_all_reduce"), f"has no effect: {why}")
    shared = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn_hidden": model.ffn_hidden, "vocab": model.vocab}
    if model.lora is not None:
        shared["lora.rank"] = model.lora.rank
    for name, value in shared.items():
        if value % tensor.degree:
            document.problem(("parallel", "tensor", "degree"), f"must divide model.{name} ({value})")
    if tensor.sequence_parallel and batch is not None and batch.target_len % tensor.degree:
        path = ("parallel", "tensor", "sequence_parallel")
        document.problem(path, f"needs a degree that divides batch.target_len ({batch.target_len})", show=False)
    if tensor.sequence_parallel and batch is not None and batch.seq_len % tensor.degree:
        path = ("parallel", "tensor", "sequence_parallel")
        document.problem(path, f"needs a degree that divides batch.seq_len ({batch.seq_len})", show=False)


def _check_data(document: Document, parallel: ParallelSection) -> None:
    """Megatron's data parallelism: what needs a distributed optimizer, and equal groups of replicas."""
    data = parallel.data
    if data is None:
        return
    if data.keep_gradients:
        _check_kept_gradients(document, parallel)
    if data.moments != "fp32" and not data.distributed_optimizer:
        document.problem(("parallel", "data", "moments"), "needs distributed_optimizer: true")
    if data.optimizer_instances == 1:
        return
    path = ("parallel", "data", "optimizer_instances")
    tensor = parallel.tensor.degree if parallel.tensor is not None else 1
    replicas = data.degree * (parallel.context.degree if parallel.context is not None else 1)
    of_experts = replicas * tensor // _expert_ranks(parallel)
    if not data.distributed_optimizer:
        document.problem(path, "needs distributed_optimizer: true")
    elif replicas % data.optimizer_instances:
        document.problem(path, f"must divide the replicas ({replicas})")
    elif parallel.expert is not None and of_experts % data.optimizer_instances:
        document.problem(path, f"must divide the replicas of experts ({of_experts})")


def _check_kept_gradients(document: Document, parallel: ParallelSection) -> None:
    """They are whole, and added, only after a backward."""
    path = ("parallel", "data", "keep_gradients")
    assert parallel.data is not None
    if parallel.data.overlap:
        document.problem(path, "gradients that wait for the end of a backward cannot be reduced beside it (overlap)")
    if parallel.pipeline is not None and parallel.pipeline.schedule in SPLITS_BACKWARD:
        document.problem(path, f"is not modelled where backwards are split ({parallel.pipeline.schedule})", show=False)


def _check_titan_tensor(document: Document, parallel: ParallelSection, model: ModelConfig) -> None:
    """parallelize_module as torchtitan calls it: under FSDP2, tokens and vocabulary shared too."""
    path = ("parallel", "tensor")
    if parallel.fsdp is None:
        document.problem(path, "with implementation torchtitan needs parallel.fsdp (degree 1 will do)", show=False)
    elif parallel.fsdp.cpu_offload:
        document.problem(("parallel", "fsdp", "cpu_offload"), "is not modelled with parallel.tensor")
    if parallel.tensor is not None and not parallel.tensor.sequence_parallel:
        message = "torchtitan's plan shares tokens between layers too: sequence_parallel: true"
        document.problem((*path, "sequence_parallel"), message)
    for name, usual in (("tied_embeddings", False), ("loss_chunks", 1), ("lora", None), ("experts", None)):
        if getattr(model, name) != usual:
            document.problem(("model", name), "is not modelled with torchtitan's parallel.tensor", show=False)
