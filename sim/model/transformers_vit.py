"""ViT as transformers 5.24 writes it: pre-norm encoder over the patches of an image and a class token.

B batch, L patches, S = L + 1 tokens, H hidden, I image size, P patch size.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.gpt import LayerNorm
from sim.model.language_model import InputShape, Linear
from sim.model.module import Module, ModuleList, Parameter
from sim.model.transformers_attention import Attended, attend, split_weights, with_weights
from sim.model.transformers_common import TransformersModel

COLOURS = 3


class PatchProjection(Module):
    """Conv2d whose kernel is its stride: [B, 3, I, I] to [B, H, I/P, I/P]."""

    def __init__(self, config: ModelConfig) -> None:
        self.weight = Parameter(config.hidden, COLOURS, config.patch_size, config.patch_size)
        self.bias = Parameter(config.hidden)

    def forward(self, pixels: Tensor) -> Tensor:
        return F.patch_convolution(pixels, self.weight, self.bias)


class PatchEmbeddings(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.projection = PatchProjection(config)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.projection(pixels)
        b, h, rows, columns = x.shape
        return x.view(b, h, rows * columns).transpose(1, 2)


class ViTEmbeddings(Module):
    """The class token before the patches, then positions."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.cls_token = Parameter(1, 1, config.hidden)
        self.position_embeddings = Parameter(1, config.max_positions, config.hidden)
        self.patch_embeddings = PatchEmbeddings(config)

    def forward(self, pixels: Tensor) -> Tensor:
        assert self.cls_token.tensor is not None
        x = self.patch_embeddings(pixels)
        first = self.cls_token.tensor.expand(x.shape[0], 1, self.config.hidden)
        x = F.cat((first, x), 1)
        x = F.add_bias(x, self.position_embeddings)
        x = F.dropout(x, self.config.dropout)
        return x


class ViTAttention(Module):
    def __init__(self, config: ModelConfig) -> None:
        h, width = config.hidden, config.heads * config.head_dim
        self.config = config
        self.q_proj, self.k_proj, self.v_proj = (Linear(h, width, config.qkv_bias) for _ in range(3))
        self.o_proj = Linear(width, h, bias=True)

    def forward(self, x: Tensor) -> Attended:
        b, s, _ = x.shape
        d = self.config.head_dim
        q = self.q_proj(x).view(b, s, -1, d).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, d).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, d).transpose(1, 2)
        y, weights = attend(q, k, v, self.config, softmax_dtype="fp32")
        y = y.reshape(b, s, -1).contiguous()
        y = self.o_proj(y)
        return with_weights(y, weights)


class ViTMLP(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.fc1 = Linear(config.hidden, config.ffn_hidden, bias=True)
        self.fc2 = Linear(config.ffn_hidden, config.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = F.gelu(x)
        x = self.fc2(x)
        return x


class ViTLayer(Module):
    """The attention's weights, where they exist, stay a local until the layer returns."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.attention = ViTAttention(config)
        self.layernorm_before = LayerNorm(config.hidden)
        self.layernorm_after = LayerNorm(config.hidden)
        self.mlp = ViTMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.layernorm_before(x)
        x, weights = split_weights(self.attention(x))
        x = F.dropout(x, self.config.dropout)
        x = x + residual
        residual = x
        x = self.layernorm_after(x)
        x = self.mlp(x)
        x = F.dropout(x, self.config.dropout)
        x = x + residual
        del weights
        return x


class ViTForImageClassification(TransformersModel):
    """ViTModel and its classifier in one module; no attention mask, no interpolated positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embeddings = ViTEmbeddings(config)
        self.layers = ModuleList([ViTLayer(config) for _ in range(config.layers)])
        self.layernorm = LayerNorm(config.hidden)
        self.classifier = Linear(config.hidden, config.classes, bias=True)
        self.name_paths()

    def inputs(self, sequences: int, seq_len: int, target_len: int) -> tuple[InputShape, InputShape]:
        """Pixels as a data loader hands them over, and a label per image."""
        size = self.config.image_size
        return ((sequences, COLOURS, size, size), "fp32"), ((sequences,), "int64")

    def hidden_states(self, pixels: Tensor) -> Tensor:
        """Cast pixels and embeddings stay locals of ViTModel.forward until it returns."""
        weight = self.embeddings.patch_embeddings.projection.weight.tensor
        assert weight is not None
        pixels = pixels.to(weight.dtype)
        embedded = self.embeddings(pixels)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden)
        return self.layernorm(hidden)

    def forward(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden_states(pixels)
        pooled = hidden.select(1, 0)
        logits = self.classifier(pooled)
        with active().computing_loss(logits):
            return F.cross_entropy(logits.view(-1, self.config.classes), labels.view(-1)), logits
