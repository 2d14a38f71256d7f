"""The section `parallel.context`: its fields, and whether they fit the model and the rest of `parallel`."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from sim.model.config import ChainConfig, ModelConfig
from sim.model.shard.context import ContextKind, ContextParallel
from sim.scenario.document import Document
from sim.scenario.kinds import Ranks
from sim.scenario.section import Section

USUAL_KIND: dict[str, ContextKind] = {"megatron": "ring", "torchtitan": "all-gather"}
"""By implementation: whose code is written for it, and how keys and values travel there if nobody says."""
PATH = ("parallel", "context")


class ContextSection(Section):
    """Context parallelism: ranks share the tokens of every sequence. Rank r of n holds the parts r and 2 n - 1 - r of
    2 n, which balances a causal mask; for gradients these ranks count as data-parallel ones."""

    degree: Ranks
    """Ranks that share a sequence; twice the degree divides batch.seq_len. They lie next to one another, around tensor
    parallelism. context x tensor x fsdp (or data) is the number of GPUs."""
    kind: Literal["ring", "all-gather"] | None = None
    """How keys and values reach the other ranks. ring: they go round, each step beside the attention of the one before
    (Transformer Engine's p2p, torch's rotate method alltoall); all-gather: whole (before attention; in torch beside the
    first step). Default: ring for implementation megatron, all-gather for torchtitan."""


class Parallel(Protocol):
    """The section `parallel`, of which this page sees what concerns sequences."""

    @property
    def context(self) -> ContextSection | None: ...

    @property
    def tensor(self) -> Any: ...

    @property
    def fsdp(self) -> Any: ...

    @property
    def pipeline(self) -> Any: ...


def check_context(
    document: Document, parallel: Parallel, model: ModelConfig | ChainConfig | None, seq_len: int | None, compute: str
) -> None:
    """Code that was written for it, in what it was written for, and equal parts."""
    context = parallel.context
    if context is None:
        return
    implementation = getattr(model, "implementation", "none")
    if model is not None and implementation not in USUAL_KIND:
        known = " or ".join(USUAL_KIND)
        document.problem(PATH, f"is written for implementation {known} only, not for {implementation}", show=False)
    elif isinstance(model, ModelConfig) and model.attention != "sdpa":
        document.problem(PATH, f"needs model.attention: sdpa, a fused kernel, not {model.attention}", show=False)
    elif isinstance(model, ModelConfig) and model.window:
        document.problem(PATH, f"model.window ({model.window}) over several ranks is not modelled", show=False)
    elif implementation == "torchtitan":
        _check_torch(document, parallel, compute)
    _check_parts(document, context, seq_len, parallel.tensor)


def _check_torch(document: Document, parallel: Parallel, compute: str) -> None:
    """torch's context_parallel under FSDP2, which reduces its gradients, over flash attention."""
    if parallel.fsdp is None:
        message = "with implementation torchtitan needs parallel.fsdp, which reduces gradients over its ranks too"
        document.problem(PATH, f"{message} (degree 1 will do)", show=False)
    if parallel.pipeline is not None:
        document.problem(PATH, "with parallel.pipeline is written for implementation megatron only", show=False)
    if compute == "fp32":
        document.problem(PATH, "is written for flash attention: precision.compute bf16 or fp16", show=False)


def _check_parts(document: Document, context: ContextSection, seq_len: int | None, tensor: Any) -> None:
    if seq_len is not None and seq_len % (2 * context.degree):
        message = f"batch.seq_len ({seq_len}) does not split into 2 x {context.degree} equal parts"
        document.problem((*PATH, "degree"), message, show=False)
    elif seq_len is not None and tensor is not None and tensor.sequence_parallel:
        rest = seq_len // context.degree
        if rest % tensor.degree:
            message = f"leaves {rest} tokens of a sequence, which {tensor.degree} tensor ranks cannot share"
            document.problem((*PATH, "degree"), message, show=False)


def resolve_context(section: ContextSection | None, model: ModelConfig | ChainConfig) -> ContextParallel:
    if section is None:
        return ContextParallel()
    return ContextParallel(section.degree, section.kind or USUAL_KIND[getattr(model, "implementation", "megatron")])
