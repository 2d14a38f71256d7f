"""The section `parallel.context`: its fields, and whether they fit the model and the rest of `parallel`."""

from __future__ import annotations

from typing import Literal

from sim.model.config import ChainConfig, ModelConfig
from sim.model.shard.context import ContextParallel
from sim.scenario.document import Document
from sim.scenario.kinds import Ranks
from sim.scenario.section import Section

IMPLEMENTATIONS = ("megatron",)
PATH = ("parallel", "context")


class ContextSection(Section):
    """Context parallelism: ranks share the tokens of every sequence. Rank r of n holds the parts r and 2 n - 1 - r of
    2 n, which balances a causal mask; for gradients these ranks count as data-parallel ones."""

    degree: Ranks
    """Ranks that share a sequence; twice the degree divides batch.seq_len. They lie next to one another, around tensor
    parallelism. context x tensor x fsdp (or data) is the number of GPUs."""
    kind: Literal["ring", "all-gather"] = "ring"
    """How keys and values reach the other ranks. ring (default): they go round, each step beside the attention of the
    one before, as Transformer Engine's p2p; all-gather: whole, before attention."""


def check_context(
    document: Document, context: ContextSection, model: ModelConfig | ChainConfig | None, seq_len: int | None,
    tensor: tuple[int, bool],
) -> None:  # fmt: skip
    """`tensor`: degree, and whether its ranks share tokens."""
    implementation = getattr(model, "implementation", "none")
    if model is not None and implementation not in IMPLEMENTATIONS:
        known = " or ".join(IMPLEMENTATIONS)
        document.problem(PATH, f"is written for implementation {known} only, not for {implementation}", show=False)
    elif isinstance(model, ModelConfig) and model.attention != "sdpa":
        document.problem(PATH, f"needs model.attention: sdpa, a fused kernel, not {model.attention}", show=False)
    parts = 2 * context.degree
    if seq_len is not None and seq_len % parts:
        message = f"batch.seq_len ({seq_len}) does not split into 2 x {context.degree} equal parts"
        document.problem((*PATH, "degree"), message, show=False)
    elif seq_len is not None and tensor[1] and seq_len // context.degree % tensor[0]:
        message = (
            f"leaves {seq_len // context.degree} tokens of a sequence, which {tensor[0]} tensor ranks cannot share"
        )
        document.problem((*PATH, "degree"), message, show=False)


def resolve_context(section: ContextSection | None) -> ContextParallel:
    return ContextParallel() if section is None else ContextParallel(section.degree, section.kind)
