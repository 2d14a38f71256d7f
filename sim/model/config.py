"""What is trained, as facts: shapes and the implementation choices that change what is saved and allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.model.experts import Experts, LatentAttention

Family = Literal["llama", "gpt", "bert", "vit", "t5"]
Implementation = Literal["torchtitan", "transformers", "nanogpt", "megatron"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of low rank on linear layers, beside which nothing is trained.

    `targets`: names of sim.model.adapters. `dtype` of the adapters; None: that of the parameters. `base`: "nf4" stores
    the frozen linear layers (not the head) in four bits, with `double_quantization` their scales in eight.
    """

    rank: int
    targets: tuple[str, ...]
    dropout: float = 0.0
    dtype: str | None = None
    base: Literal["nf4"] | None = None
    double_quantization: bool = False
    sharded: bool = False
    """FSDP splits the four-bit weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """Products of layers' linear parts in 8 bit (nvfp4: in 4) by Transformer Engine, but for so many layers at either end.

    `recipe`: Megatron's name of how scales are found (sim.runtime.fp8). `stored`: these weights exist in 8 bit only.
    """

    recipe: Literal["delayed", "tensorwise", "mxfp8", "blockwise", "nvfp4"]
    first: int = 0
    last: int = 0
    stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and choices of one transformer. Sizes are counts; probabilities are fractions.

    `implementation` decides which code is imitated; the remaining choices default to what that code does and may be
    set one by one. Letters used elsewhere: L layers, H hidden, F ffn_hidden, A heads, K kv_heads, D head_dim, V vocab.
    """

    name: str
    family: Family
    implementation: Implementation
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 0
    max_positions: int
    tied_embeddings: bool = False
    bias: bool = False
    """Biases in the linear layers (GPT: all of them)."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections only (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k (Qwen3)."""
    dropout: float = 0.0
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_new", "relu", "gated_gelu", "squared_relu"] = "silu"
    """silu: gated MLPs; squared_relu: relu(x) ** 2 between two products without a gate (Nemotron), Megatron's code."""
    norm: Literal["fused", "manual", "layer_norm"] = "fused"
    """fused: one RMSNorm kernel (F.rms_norm); manual: x.float() * rsqrt(...) op by op; layer_norm: GPT."""
    rope: Literal["complex", "cos_sin", "half", "fused", "none", "relative"] = "complex"
    """complex: view_as_complex in fp32; cos_sin: rotate-half in fp32; half: rotate-half in the model dtype (transformers);
    fused: one kernel (Megatron)."""
    gqa: Literal["repeat", "sdpa"] = "repeat"
    """repeat: expand + reshape copies k and v to all heads; sdpa: enable_gqa, the kernel reads fewer heads."""
    attention: Literal["sdpa", "math", "unfused"] = "sdpa"
    """sdpa: the fused kernel that PyTorch picks (flash in 16 bit, efficient in fp32); math: SDPA's math kernel;
    unfused: attention written out op by op, as Megatron without fused attention and transformers' "eager"."""
    window: int = 0
    """Keys that a query sees at most, itself among them; 0: all before it. (Megatron's Llama-like models.)"""
    full_attention_every: int = 0
    """With a window: every so-manieth layer sees all keys; 0: none does."""
    bias_gelu_fusion: bool = False
    """Megatron: gelu(x + bias) in one kernel."""
    swiglu_fusion: bool = False
    """Megatron: silu(gate) * value in one kernel, which keeps their common input alone."""
    fp8_swiglu_input: bool = False
    """Megatron: that common input is kept in 8 bit until backward (activation_func_fp8_input_store)."""
    bias_dropout_fusion: bool = False
    """Megatron: residual + dropout(x + bias) in one kernel."""
    persistent_norm: bool = False
    """Megatron: norms by kernels that keep a row in registers (apex's FastLayerNorm, Transformer Engine)."""
    loss_fusion: Literal["none", "native", "te"] = "none"
    """Megatron: the loss per token op by op, in compiled regions (its "native"), or in Transformer Engine's kernels."""
    logits: Literal["loss_upcast", "model_upcast", "keep_dtype"] = "loss_upcast"
    """Where logits become fp32: in the loss function, in the model, or nowhere."""
    keep_logits: bool = False
    """The training loop still holds the logits during backward."""
    loss_chunks: int = 1
    loss_chunking: Literal["backward", "projection", "logits"] = "backward"
    """What is done in chunks of the sequence (sim.model.chunked_loss): projection, loss and backward (torchtitan);
    projection and loss (torchtune); the loss alone."""
    liger: tuple[str, ...] = ()
    """Kernels of Liger in the place of transformers' own: rope, rms_norm, swiglu, fused_linear_cross_entropy."""
    mlp_tiles: int = 1
    """transformers' Llama: the MLP runs in so many tiles of tokens, and again in backward (DeepSpeed's TiledMLP)."""
    head: Literal["language_model", "classification", "pretraining"] = "language_model"
    """What comes out: scores over the vocabulary for every token, over `classes` for every sequence, or the first with
    those of the order of two sentences (Megatron's BERT)."""
    classes: int = 0
    token_types: int = 0
    """Rows of the table of token types (BERT)."""
    decoder_layers: int = 0
    """Blocks of the decoder, beside the `layers` of the encoder (T5)."""
    relative_buckets: int = 0
    """Rows of the table of biases by distance (T5)."""
    image_size: int = 0
    patch_size: int = 0
    """Images are squares of image_size pixels a side, cut into patches of patch_size (ViT)."""
    experts: Experts | None = None
    """Experts in the place of MLPs. None: no experts."""
    latent: LatentAttention | None = None
    """Multi-head latent attention; `head_dim` is then a head's width without positions. None: queries, keys, values."""
    mtp_layers: int = 0
    """Megatron: layers behind the last that each predict one token more, through the same head (DeepSeek-V3: 1)."""
    frozen: tuple[str, ...] = ()
    """Shell patterns of parameter names that need no gradient, e.g. "layers.[01].*"."""
    input_gradients: bool = False
    """The embedding's output is made to require a gradient, whatever is frozen (enable_input_require_grads)."""
    lora: Lora | None = None
    """Adapters; None: all parameters but the frozen ones are trained."""
    fp8: Fp8 | None = None
    """Megatron with Transformer Engine: which products are in 8 bit. None: all in the compute dtype."""

    first_layer: int = 0
    """Of a stage of a pipeline: the number of its first layer in the whole model."""

    def window_of(self, layer: int) -> int:
        """The window of layer number `layer`; 0: it sees all keys."""
        every = self.full_attention_every
        return 0 if every and (self.first_layer + layer + 1) % every == 0 else self.window

    def has_experts(self, layer: int) -> bool:
        """Are there experts in the place of the MLP of layer number `layer`?"""
        number, experts = self.first_layer + layer, self.experts
        return experts is not None and number >= experts.dense_layers and (number + 1) % experts.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig:
    """The toy of the textbook: layers with given bytes and times; lists have one entry per layer.

    entry_bytes: what a checkpoint must keep (the layer's input); activation_bytes: what a layer saves for backward.
    `shares_entry`: the entry's storage is part of what the layer saves (as in PyTorch), else it comes on top.
    """

    name: str
    entry_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    recompute_ns: tuple[int, ...]
    weight_gradient_ns: tuple[int, ...]
    """Of `backward_ns`, what makes weight gradients: zero-bubble schedules put it off."""
    exposed_communication_ns: int = 0
    """Communication per step that nothing hides, when nothing is recomputed."""
    recompute_communication_ns: int = 0
    """Further communication per step that cannot hide once layers are recomputed."""
    shares_entry: bool = False

    @property
    def layers(self) -> int:
        return len(self.entry_bytes)
