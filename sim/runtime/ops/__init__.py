"""One rule per operator: what it saves, what it allocates and launches forward and backward.

Importing this package fills `Tape.rules`. Each rule names its source: TAPE.md and TAPE_LLAMA_FSDP.md are the project's
own measurements of torch 2.14 (real autograd over a fake driver); where a rule is only read in torch's source it says so.
"""

from sim.runtime.ops import (
    attention,
    attention_math,
    biased_attention,
    cat,
    chain,
    chunked_loss,
    context_parallel,
    convolution,
    embedding,
    experts,
    fused_attention,
    grouped,
    loss,
    matmul,
    megatron,
    nf4,
    norm,
    pointwise,
    routing,
    sequence,
    tensor_parallel,
    transformer_engine,
    ulysses,
    views,
)

__all__ = [
    "attention",
    "attention_math",
    "biased_attention",
    "cat",
    "chain",
    "chunked_loss",
    "context_parallel",
    "convolution",
    "embedding",
    "experts",
    "fused_attention",
    "grouped",
    "loss",
    "matmul",
    "megatron",
    "nf4",
    "norm",
    "pointwise",
    "routing",
    "sequence",
    "tensor_parallel",
    "transformer_engine",
    "ulysses",
    "views",
]
