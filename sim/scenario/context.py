"""The section `parallel.context`: its fields, and whether they fit the model and the rest of `parallel`."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from sim.model.config import ChainConfig, ModelConfig
from sim.model.shard.context import ContextKind, ContextParallel
from sim.scenario.document import Document
from sim.scenario.kinds import Ranks
from sim.scenario.section import Section

KINDS: dict[str, tuple[ContextKind, ...]] = {
    "megatron": ("ring", "all-gather", "ulysses"),
    "torchtitan": ("all-gather", "ring"),
    "transformers": ("ulysses",),
}
"""By implementation: whose code is written for it, and which exchanges it knows; the first is its usual one."""
PATH = ("parallel", "context")


class ContextSection(Section):
    """Context parallelism: ranks share the tokens of every sequence; for gradients they count as data-parallel ones. Rank r
    of n holds the parts r and 2 n - 1 - r of 2 n, which balances a causal mask; with transformers the r-th of n parts."""

    degree: Ranks
    """Ranks that share a sequence; twice the degree divides batch.seq_len (with transformers the degree). They lie next to
    one another, around tensor parallelism. context x tensor x fsdp (or data, zero) is the number of GPUs."""
    kind: Literal["ring", "all-gather", "ulysses"] | None = None
    """How attention comes to whole sequences. ring: keys and values go round, each step beside the attention of the one
    before (Transformer Engine's p2p, torch's rotate method alltoall); all-gather: they are gathered whole (before
    attention; in torch beside the first step); ulysses: ranks exchange tokens for heads (DeepSpeed's for transformers under
    zero or fsdp, Transformer Engine's a2a for megatron). Default: ring for megatron, all-gather for torchtitan, ulysses for
    transformers."""


class Parallel(Protocol):
    """The section `parallel`, of which this page sees what concerns sequences."""

    @property
    def context(self) -> ContextSection | None: ...

    @property
    def tensor(self) -> Any: ...

    @property
    def fsdp(self) -> Any: ...

    @property
    def zero(self) -> Any: ...

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
    if model is not None and implementation not in KINDS:
        known = ", ".join(KINDS)
        document.problem(PATH, f"is written for implementations {known} only, not for {implementation}", show=False)
    elif model is not None and context.kind is not None and context.kind not in KINDS[implementation]:
        document.problem((*PATH, "kind"), f"{implementation} knows", allowed=KINDS[implementation])
    elif isinstance(model, ModelConfig) and model.attention != "sdpa":
        document.problem(PATH, f"needs model.attention: sdpa, a fused kernel, not {model.attention}", show=False)
    elif isinstance(model, ModelConfig) and model.window:
        document.problem(PATH, f"model.window ({model.window}) over several ranks is not modelled", show=False)
    elif implementation == "torchtitan":
        _check_torch(document, parallel, compute)
    elif implementation == "transformers":
        _check_deepspeed(document, parallel, model)
    in_parts = 1 if implementation == "transformers" else 2
    _check_parts(document, context, seq_len, parallel.tensor, in_parts)
    kind = context.kind or KINDS.get(implementation, ("ring",))[0]
    if isinstance(model, ModelConfig) and kind == "ulysses":
        _check_heads(document, context.degree, parallel.tensor, model)


def _check_torch(document: Document, parallel: Parallel, compute: str) -> None:
    """torch's context_parallel under FSDP2, which reduces its gradients, over flash attention."""
    if parallel.fsdp is None:
        message = "with implementation torchtitan needs parallel.fsdp, which reduces gradients over its ranks too"
        document.problem(PATH, f"{message} (degree 1 will do)", show=False)
    if compute == "fp32":
        document.problem(PATH, "is written for flash attention: precision.compute bf16 or fp16", show=False)


def _check_deepspeed(document: Document, parallel: Parallel, model: ModelConfig | ChainConfig | None) -> None:
    """Around the attention of Llama-like models, under something that reduces gradients over its ranks too."""
    if getattr(model, "family", "llama") != "llama":
        document.problem(PATH, "with implementation transformers is written for Llama-like models only", show=False)
    elif parallel.zero is None and parallel.fsdp is None:
        message = (
            "with implementation transformers needs parallel.zero or fsdp, which reduce gradients over its ranks too"
        )
        document.problem(PATH, f"{message} (degree 1 will do)", show=False)


def _check_heads(document: Document, ranks: int, tensor: Any, model: ModelConfig) -> None:
    """Every rank has as many heads as the others; DeepSpeed repeats key heads, so that each rank has one."""
    path, split = (*PATH, "degree"), tensor.degree if tensor is not None else 1
    heads, kv_heads = model.heads // split, model.kv_heads // split
    if heads % ranks:
        document.problem(path, f"with ulysses {ranks} ranks cannot share {heads} heads", show=False)
    elif kv_heads % ranks and (model.implementation == "megatron" or ranks % kv_heads):
        heads_are = f"{kv_heads} key head{'s' * (kv_heads > 1)}"
        document.problem(path, f"with ulysses {ranks} ranks cannot share {heads_are}", show=False)
    elif model.latent is not None:
        document.problem(PATH, "ulysses with latent attention is not modelled", show=False)


def _check_parts(document: Document, context: ContextSection, seq_len: int | None, tensor: Any, parts: int) -> None:
    """`parts`: of a sequence on a rank."""
    if seq_len is not None and seq_len % (parts * context.degree):
        count = f"{parts} x {context.degree}" if parts > 1 else context.degree
        message = f"batch.seq_len ({seq_len}) does not split into {count} equal parts"
        document.problem((*PATH, "degree"), message, show=False)
    elif seq_len is not None and tensor is not None and tensor.sequence_parallel:
        rest = seq_len // context.degree
        if rest % tensor.degree:
            message = f"leaves {rest} tokens of a sequence, which {tensor.degree} tensor ranks cannot share"
            document.problem((*PATH, "degree"), message, show=False)


def resolve_context(section: ContextSection | None, model: ModelConfig | ChainConfig) -> ContextParallel:
    if section is None:
        return ContextParallel()
    return ContextParallel(section.degree, section.kind or KINDS[getattr(model, "implementation", "megatron")][0])
