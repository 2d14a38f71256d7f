"""The vocabulary of dtypes: of parameters, of products, of sums."""

from __future__ import annotations

from typing import Literal

from sim.scenario.kinds import CountOrZero
from sim.scenario.section import Section

Dtype = Literal["fp32", "bf16", "fp16"]


class PrecisionSection(Section):
    """Dtypes. With FSDP this is its MixedPrecisionPolicy; on one GPU, torch.autocast or a model in one dtype."""

    parameters: Dtype = "fp32"
    """Dtype in which parameters are stored and updated. Default: fp32."""
    compute: Dtype = "bf16"
    """Dtype of the matrix products. Default: bf16."""
    reduce: Dtype = "fp32"
    """Dtype of gradient reduction between ranks. Default: fp32."""
    float8: Literal["tensorwise", "rowwise"] | None = None
    """Products of the blocks' linear layers in 8 bit, as torchao's Float8Linear with dynamic scales: one per tensor, or per
    row. The head stays in the compute dtype. Without `compile` (tensorwise only) casts are kernels of their own, through
    fp32 copies: slower than 16 bit, mostly. Default: null."""
    grad_scaler: bool = False
    """torch.amp.GradScaler around fp16 autocast: the loss is scaled, gradients are divided and checked before the step; unless
    the optimizer is fused, the host waits to read whether any overflowed. Default: false."""
    fp8: Literal["delayed", "tensorwise", "mxfp8", "blockwise"] | None = None
    """megatron: products of the layers' linear parts (qkv, proj, fc1, fc2, experts) in 8 bit by Transformer Engine, with
    scales from earlier steps (delayed), per tensor as it is (tensorwise), per 32 numbers (mxfp8, from Blackwell on), or as
    DeepSeek-V3 per 1 x 128 numbers and per 128 x 128 of weights (blockwise, on Hopper; its products at the rate of others).
    Attention, embedding and head stay in the compute dtype. Default: null."""
    fp8_edge_layers: CountOrZero = 0
    """With fp8 or fp4: so many layers at either end stay in the compute dtype (first-last-layers-bf16). Default: 0."""
    fp4: Literal["nvfp4"] | None = None
    """megatron: the same products in 4 bit by Transformer Engine, instead of fp8, from Blackwell on: a scale per 16 numbers and
    one per tensor, random Hadamard transforms before weights' gradients. Default: null."""
    autocast: bool | None = None
    """Use torch.autocast instead of casting parameters. Default: only on one GPU, if compute differs from parameters
    (nothing else would cast there)."""

    @property
    def narrow(self) -> Literal["delayed", "tensorwise", "mxfp8", "blockwise", "nvfp4"] | None:
        """How Transformer Engine scales numbers of 8 or 4 bit; None: it has none."""
        return self.fp8 or self.fp4
