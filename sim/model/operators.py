"""Which aten operators the forward of a transformer block may run: what a selective policy can meet."""

from __future__ import annotations

from sim.model.config import ModelConfig

NORMS = {
    "fused": {"aten._fused_rms_norm"},
    "manual": {"aten.pow", "aten.mean", "aten.rsqrt", "aten.mul"},
    "layer_norm": {"aten.native_layer_norm"},
}
ROPES = {
    "complex": {"aten.mul"},
    "cos_sin": {"aten.neg", "aten.cat", "aten.mul"},
    "half": {"aten.neg", "aten.cat", "aten.mul"},
    "fused": set[str](),
    "none": set[str](),
    "relative": {"aten.add", "aten.embedding"},
}
ACTIVATIONS = {
    "silu": {"aten.silu", "aten.mul"},
    "gelu": {"aten.gelu"},
    "gelu_tanh": {"aten.gelu"},
    "gelu_new": {"aten.pow", "aten.mul", "aten.tanh"},
    "relu": {"aten.relu"},
    "gated_gelu": {"aten.pow", "aten.mul", "aten.tanh"},
    "squared_relu": set[str](),
}
ROUTED = {"aten.topk", "aten._softmax", "aten.sum", "aten.mul", "aten.div", "aten.sigmoid", "aten.add"}
GROUPED = {"aten._grouped_mm", "aten.index", "aten.div_"}
SORTED = {
    "aten.gather", "aten.scatter", "aten.masked_fill", "aten.masked_select", "aten.index_select", "aten.scatter_add_",
    "aten.cat",
}  # fmt: skip
"""Of experts: their router's, and how transformers and Megatron bring tokens to them."""
FLASH = "aten._scaled_dot_product_flash_attention"
EFFICIENT = "aten._scaled_dot_product_efficient_attention"


def block_operators(model: ModelConfig, compute: str) -> frozenset[str]:
    """Aten names that a block may run when it computes in the dtype `compute`; no other does occur.

    Megatron's fused functions are none of them. Copies (aten.clone, aten._to_copy) hang on strides and casts, so that
    they are always among them.
    """
    found = {"aten.clone", "aten._to_copy"} | products(model) | ROPES[model.rope]
    if not model.persistent_norm:
        found |= NORMS[model.norm]
    dropout = {"aten.native_dropout"} if model.dropout else set[str]()
    fused = model.family == "llama" and model.implementation == "megatron"
    if not model.swiglu_fusion and not (model.bias_gelu_fusion and model.bias):
        found |= ACTIVATIONS[model.activation]
    if not model.bias_dropout_fusion:
        found |= {"aten.add"} | dropout
    if model.attention == "math":
        found |= {"aten._safe_softmax", "aten.bmm", "aten.mul", "aten.add"} | dropout
    elif model.attention == "unfused" and model.implementation == "megatron":
        found |= {"aten.baddbmm", "aten.bmm"} | dropout
    elif model.attention == "unfused":
        found |= {"aten.bmm", "aten.mul", "aten._softmax"} | dropout
    elif not fused:
        found.add(EFFICIENT if compute == "fp32" else FLASH)
    if model.experts is not None:
        found |= ROUTED | (GROUPED if model.implementation == "transformers" else SORTED)
    return frozenset(found)


def products(model: ModelConfig) -> set[str]:
    """Products of the linear layers: a bias makes aten.addmm of aten.mm, but Megatron adds biases on their own."""
    if model.implementation == "megatron":
        return {"aten.mm"}
    if model.bias:
        return {"aten.addmm"}
    return {"aten.mm", "aten.addmm"} if model.qkv_bias else {"aten.mm"}
