"""Experts: what a scenario may say of them, and how their ranks fit the others."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from sim.hardware.mesh import Mesh, MeshError
from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.document import MISSING, Document
from sim.scenario.kinds import Count, CountOrZero, PositiveNumber, Ranks
from sim.scenario.section import Section


class ExpertsSection(Section):
    """A mixture of experts in the place of MLPs; fields that a preset or config.json gives may be left out."""

    count: Count | None = None
    """Routed experts of a layer."""
    top_k: Count | None = None
    """Experts that work on a token."""
    ffn_hidden: Count | None = None
    """Width inside one routed expert (model.ffn_hidden is that of plain MLPs)."""
    shared_ffn_hidden: CountOrZero | None = None
    """Width inside the expert that every token passes, all shared ones together. Default: 0, none."""
    shared_gate: bool | None = None
    """A learned gate scales the shared expert's result (Qwen2-MoE). Default: false."""
    dense_layers: CountOrZero | None = None
    """The first so many layers have a plain MLP. Default: 0."""
    every: Count | None = None
    """megatron: of every so many layers the last has experts, the others a plain MLP (Llama 4: 2). Default: 1, all have."""
    scores: Literal["softmax", "sigmoid"] | None = None
    """What makes scores of the router's logits. Default: softmax."""
    scores_first: bool | None = None
    """Scores over all experts before the best are chosen, else softmax over the chosen alone. Default: false."""
    scaling: PositiveNumber | None = None
    """Factor on the chosen experts' weights. Default: none."""
    groups: Count | None = None
    """Groups of experts, of which `groups_top` are chosen first (DeepSeek). Default: 1, no groups."""
    groups_top: Count | None = None
    """Groups that remain for a token. Default: 1."""
    selection_bias: bool | None = None
    """A bias on scores for the choice only, which no gradient moves (DeepSeek-V3). Default: false."""
    sinkhorn: bool | None = None
    """megatron: choose by Sinkhorn's iteration (moe-router-load-balancing-type sinkhorn); scores are then sigmoids of the
    logits with one expert per token, else their softmax. How many rounds it takes is assumed. Default: false."""
    auxiliary_loss: bool | None = None
    """A loss on the balance of the choice. Default: false."""
    router_dtype: Literal["fp32", "compute"] | None = None
    """Dtype of the router's logits. Default: fp32."""
    weights_dtype: Literal["fp32", "compute"] | None = None
    """transformers: dtype in which experts' results are weighted. Default: compute; fp32 for Mixtral."""
    dispatcher: Literal["alltoall", "allgather", "flex"] | None = None
    """megatron: send copies of tokens to the ranks of their experts, or give all tokens to every rank,
    or send a token once to each rank that has some of its experts, where rows are sorted by expert (flex with DeepEP's
    HybridEP; its bandwidth as all-to-all's) (moe-token-dispatcher-type). Default: alltoall."""
    permute_fusion: bool | None = None
    """megatron: sort tokens by one kernel each way (moe-permute-fusion); allgather never does. Default: true."""
    grouped: bool | None = None
    """megatron: products of a rank's experts together (moe-grouped-gemm), else one expert after the other. Default: true."""
    bias: bool | None = None
    """megatron: biases in both linear layers of an expert (GPT-OSS); those of the second are added op by op, weighted.
    Default: false."""
    clamped: bool | None = None
    """megatron: gate and value are clamped, op by op, before they meet (GPT-OSS). Default: false."""
    imbalance: PositiveNumber | None = None
    """Tokens of the busiest expert over the mean of all experts; the simulated rank has this expert, in every layer.
    Default: 1, balanced, which is assumed."""
    capacity_factor: PositiveNumber | None = None
    """An expert takes at most so many times the mean; tokens on top are dropped. Default: none, dropless."""


class LatentSection(Section):
    """Multi-head latent attention (MLA); model.head_dim is a head's width without positions."""

    kv_rank: Count | None = None
    """Width of the compressed keys and values (kv_lora_rank)."""
    q_rank: CountOrZero | None = None
    """Width of the compressed queries (q_lora_rank). Default: 0, queries are not compressed."""
    rope_head_dim: Count | None = None
    """Entries of a head that carry positions. Default: 64."""
    value_head_dim: Count | None = None
    """Entries of a head's value. Default: 128."""


class ExpertParallelSection(Section):
    """Expert parallelism as Megatron's: experts are spread over ranks that share neither tokens nor replicas."""

    degree: Ranks
    """Ranks that share a layer's experts (expert-model-parallel-size). degree x tensor divides the product of the data
    and tensor degrees; what remains are replicas of the experts."""
    tensor: Ranks | None = None
    """Ranks that share each expert's matrices (expert-tensor-parallel-size). Default: parallel.tensor.degree, as
    Megatron."""


PATH = ("parallel", "expert")


def expert_mesh(
    document: Document, section: ExpertParallelSection | None, mesh: Mesh, tensor_degree: int
) -> Mesh | None:
    """The same ranks numbered for experts, outermost first: pp, edp (replicas of experts), ep, etp; or a problem."""
    degree = section.degree if section is not None else 1
    tensor = section.tensor or tensor_degree if section is not None else tensor_degree
    ranks = mesh.gpus // mesh.degree("pp")
    if ranks % (degree * tensor):
        sharing = f"{degree} x {tensor}" if tensor > 1 else f"{degree}"
        message = f"{sharing} ranks for an expert layer do not go evenly into {ranks} (data x tensor)"
        document.problem((*PATH, "degree"), message, show=False)
        return None
    dimensions = (
        ("pp", mesh.degree("pp")), ("edp", ranks // degree // tensor), ("ep", degree), ("etp", tensor),
    )  # fmt: skip
    try:
        return Mesh(dimensions, mesh.gpus_per_node, mesh.gpus)
    except MeshError as error:
        document.problem(PATH, str(error), show=False)
        return None


class Parallel(Protocol):
    """The section `parallel`, of which this page sees what concerns experts."""

    @property
    def expert(self) -> ExpertParallelSection | None: ...

    @property
    def tensor(self) -> Any: ...

    @property
    def fsdp(self) -> Any: ...


def check_experts(document: Document, parallel: Parallel, model: ModelConfig | ChainConfig) -> None:
    """Experts go evenly over their ranks, and Megatron wants sequence parallelism beside tensor parallelism."""
    experts = model.experts if isinstance(model, ModelConfig) else None
    section, split = parallel.expert, parallel.tensor
    tensor_degree = split.degree if split is not None else 1
    if experts is None:
        if section is not None and document.value(("model", "experts")) is MISSING:
            document.problem(PATH, "the model has no experts: leave it out", show=False)
        return
    if section is not None and isinstance(model, ModelConfig) and model.implementation != "megatron":
        document.problem(PATH, "only implementation megatron is written for it", show=False)
        return
    if section is not None and experts.count % section.degree:
        document.problem((*PATH, "degree"), f"must divide model.experts.count ({experts.count})")
    tensor = (section.tensor if section is not None else None) or tensor_degree
    if experts.ffn_hidden % tensor:
        message = f"{tensor} ranks for each expert must divide model.experts.ffn_hidden ({experts.ffn_hidden})"
        document.problem(("parallel", "expert", "tensor"), message, show=False)
    if experts.dispatcher == "flex" and tensor > 1:
        path = ("parallel", "expert", "tensor")
        document.problem(path, "model.experts.dispatcher: flex is modelled with one rank per expert", show=False)
    if experts.shared_ffn_hidden % tensor_degree:
        message = f"must divide model.experts.shared_ffn_hidden ({experts.shared_ffn_hidden})"
        document.problem(("parallel", "tensor", "degree"), message)
    if split is not None and tensor_degree > 1 and not split.sequence_parallel:
        path = ("parallel", "tensor", "sequence_parallel")
        document.problem(path, "with experts Megatron trains with sequence parallelism only: true is expected")
    if section is not None and parallel.fsdp is not None:
        document.problem(PATH, "is modelled with Megatron's data parallelism only, not under fsdp", show=False)
