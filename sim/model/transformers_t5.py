"""T5 as transformers 5.24 writes it. B batch, S source and T target tokens.

Pre-norm encoder and decoder; a bias by distance, computed in each stack's first block, is added to all its scores. The
decoder's blocks attend to themselves under a causal mask, then to what the encoder gave. No attention mask is given for
the source, no cache kept.
"""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.language_model import Embedding, InputShape, Linear
from sim.model.module import Module, ModuleList, Parameter
from sim.model.t5_positions import arange, causal_mask, distance_buckets, shift_right, shifted_positions
from sim.model.transformers_attention import eager_attention
from sim.model.transformers_common import TransformersModel
from sim.model.transformers_gpt2 import gelu_new


class T5LayerNorm(Module):
    """RMSNorm with statistics in fp32, cast to the weight's dtype where that has 16 bit."""

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width)

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.weight.tensor is not None
        variance = hidden.float().square().mean_last()
        hidden = hidden * (variance + 1e-6).rsqrt()
        if self.weight.tensor.dtype in ("fp16", "bf16"):
            hidden = hidden.to(self.weight.tensor.dtype)
        return F.scale_by(hidden, self.weight, weight_first=True)


class DenseActDense(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.wi = Linear(config.hidden, config.ffn_hidden)
        self.wo = Linear(config.ffn_hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wi(x)
        x = F.relu(x)
        x = F.dropout(x, self.config.dropout)
        x = _in_dtype_of(x, self.wo)
        x = self.wo(x)
        return x


class DenseGatedActDense(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.wi_0 = Linear(config.hidden, config.ffn_hidden)
        self.wi_1 = Linear(config.hidden, config.ffn_hidden)
        self.wo = Linear(config.ffn_hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = gelu_new(self.wi_0(x))
        linear = self.wi_1(x)
        x = gate * linear
        x = F.dropout(x, self.config.dropout)
        x = _in_dtype_of(x, self.wo)
        x = self.wo(x)
        return x


def _in_dtype_of(x: Tensor, linear: Linear) -> Tensor:
    assert linear.weight.tensor is not None
    return x.to(linear.weight.tensor.dtype)


class LayerFF(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.DenseReluDense = DenseGatedActDense(config) if config.activation == "gated_gelu" else DenseActDense(config)
        self.layer_norm = T5LayerNorm(config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        forwarded = self.layer_norm(x)
        forwarded = self.DenseReluDense(forwarded)
        x = x + F.dropout(forwarded, self.config.dropout)
        return x


class T5Attention(Module):
    """Over the tokens themselves, or over those of `source`. The bias is computed where none is given: by distance, or
    zeros (across stacks), which need a gradient where blocks are checkpointed."""

    def __init__(self, config: ModelConfig, has_bias: bool, is_decoder: bool) -> None:
        h, width = config.hidden, config.heads * config.head_dim
        self.config = config
        self.is_decoder = is_decoder
        self.gradient_checkpointing = False
        self.q, self.k, self.v = (Linear(h, width) for _ in range(3))
        self.o = Linear(width, h)
        if has_bias:
            self.relative_attention_bias = Embedding(config.relative_buckets, config.heads)

    def forward(
        self, x: Tensor, mask: Tensor | None, source: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        b, s, _ = x.shape
        c = self.config
        q = self.q(x).view(b, s, -1, c.head_dim).transpose(1, 2)
        states = x if source is None else source
        length = states.shape[1]
        k = self.k(states).view(b, length, -1, c.head_dim).transpose(1, 2)
        v = self.v(states).view(b, length, -1, c.head_dim).transpose(1, 2)
        if bias is None and hasattr(self, "relative_attention_bias"):
            bias = self._bias_by_distance(s, length)
        elif bias is None:
            bias = F.zeros((1, c.heads, s, length), q.dtype, self.gradient_checkpointing)
        y, weights = self._attend(q, k, v, mask, bias, causal=self.is_decoder and source is None)
        y = y.reshape(b, s, -1).contiguous()
        y = self.o(y)
        return y, bias, weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        c = self.config
        if c.attention == "unfused":
            return eager_attention(q, k, v, c.dropout, biases=(bias,) if mask is None else (bias, mask))
        y = F.biased_attention(q, k, v, _added_bias(bias, causal), c.dropout)
        return y.transpose(1, 2).contiguous(), None

    def _bias_by_distance(self, queries: int, keys: int) -> Tensor:
        """[1, A, Q, K] out of a table [buckets, A]; positions and distances are locals until it returns."""
        context = shifted_positions(queries)
        memory = arange(keys)
        relative = F.compute("sub", (queries, keys), "int64", memory, context)
        values = self.relative_attention_bias(distance_buckets(relative, bidirectional=not self.is_decoder))
        return values.permute(2, 0, 1).unsqueeze(0)


def _added_bias(bias: Tensor, causal: bool) -> Tensor:
    """create_position_bias_mask: the causal mask is made of positions, and comes into the bias, in every layer anew."""
    if causal:
        length = bias.shape[2]
        queries, keys = arange(length), arange(length)
        seen = F.compute("ge", (length, length), "bool", queries, keys)
        del queries, keys
        bias = F.where(seen, bias)
    return bias.contiguous()


class LayerSelfAttention(Module):
    def __init__(self, config: ModelConfig, has_bias: bool, is_decoder: bool) -> None:
        self.config = config
        self.SelfAttention = T5Attention(config, has_bias, is_decoder)
        self.layer_norm = T5LayerNorm(config.hidden)

    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        normed = self.layer_norm(x)
        attended: Any = self.SelfAttention(normed, mask, None, bias)
        y, bias, weights = attended
        del attended
        assert bias is not None
        y = x + F.dropout(y, self.config.dropout)
        return y, bias, weights


class LayerCrossAttention(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.EncDecAttention = T5Attention(config, has_bias=False, is_decoder=True)
        self.layer_norm = T5LayerNorm(config.hidden)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        normed = self.layer_norm(x)
        attended: Any = self.EncDecAttention(normed, None, source, bias)
        y, bias, weights = attended
        del attended
        assert bias is not None
        y = x + F.dropout(y, self.config.dropout)
        return y, bias, weights


class EncoderBlock(Module):
    def __init__(self, config: ModelConfig, has_bias: bool) -> None:
        self.layer = ModuleList([LayerSelfAttention(config, has_bias, is_decoder=False), LayerFF(config)])

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        attended: Any = self.layer[0](x, None, bias)
        x, bias, weights = attended
        del attended
        assert bias is not None
        x = self.layer[1](x)
        del weights
        return x, bias


class DecoderBlock(Module):
    """Called with the encoder's result, the mask where attention is written out, and with both biases once the first
    block has made them."""

    def __init__(self, config: ModelConfig, has_bias: bool) -> None:
        self.masks = config.attention == "unfused"
        self_attention = LayerSelfAttention(config, has_bias, is_decoder=True)
        self.layer = ModuleList([self_attention, LayerCrossAttention(config), LayerFF(config)])

    def forward(self, x: Tensor, source: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = others[0] if self.masks else None
        bias, cross_bias = others[self.masks :] or (None, None)
        attended: Any = self.layer[0](x, mask, bias)
        x, bias, weights = attended
        attended = self.layer[1](x, source, cross_bias)
        x, cross_bias, weights = attended
        del attended
        assert bias is not None and cross_bias is not None
        x = self.layer[2](x)
        del weights
        return x, bias, cross_bias


class T5Stack(Module):
    """Blocks and the norm behind them; the embedding is the model's."""

    def __init__(self, config: ModelConfig, is_decoder: bool) -> None:
        self.config = config
        count = config.decoder_layers if is_decoder else config.layers
        block = DecoderBlock if is_decoder else EncoderBlock
        self.block = ModuleList([block(config, has_bias=number == 0) for number in range(count)])
        self.final_layer_norm = T5LayerNorm(config.hidden)

    def finish(self, hidden: Tensor) -> Tensor:
        hidden = self.final_layer_norm(hidden)
        return F.dropout(hidden, self.config.dropout)


class T5Encoder(T5Stack):
    def forward(self, embedded: Tensor) -> Tensor:
        hidden = F.dropout(embedded, self.config.dropout)
        biases: tuple[Tensor, ...] = ()
        for block in self.block:
            results: Any = block(hidden, *biases)
            hidden, *biases = results
            del results
        return self.finish(hidden)


class T5Decoder(T5Stack):
    def forward(self, embedded: Tensor, source: Tensor) -> Tensor:
        written_out = self.config.attention == "unfused"
        mask = causal_mask(embedded.shape[0], embedded.shape[1], embedded.dtype) if written_out else None
        hidden = F.dropout(embedded, self.config.dropout)
        biases: tuple[Tensor, ...] = ()
        for block in self.block:
            results: Any = block(hidden, *((source,) if mask is None else (source, mask)), *biases)
            hidden, *biases = results
            del results
        return self.finish(hidden)


class T5ForConditionalGeneration(TransformersModel):
    """The model computes the loss of the targets, which shifted right are what the decoder reads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.shared = Embedding(config.vocab, config.hidden)
        self.encoder = T5Encoder(config, is_decoder=False)
        self.decoder = T5Decoder(config, is_decoder=True)
        self.lm_head = Linear(config.hidden, config.vocab)
        self.lm_head.weight = self.shared.weight
        self.name_paths()

    def stacks(self) -> tuple[ModuleList, ...]:
        return self.encoder.block, self.decoder.block

    def begin_checkpointing(self) -> None:
        for block in self.decoder.block:
            assert isinstance(block, DecoderBlock)
            cross = block.layer[1]
            assert isinstance(cross, LayerCrossAttention)
            cross.EncDecAttention.gradient_checkpointing = True

    def inputs(self, sequences: int, seq_len: int, target_len: int) -> tuple[InputShape, InputShape]:
        return ((sequences, seq_len), "int64"), ((sequences, target_len), "int64")

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings are locals of each stack's forward. The first T5 scales the decoder's result, the gated ones do
        not; their weights are tied all the same (configuration_t5.py)."""
        source = self.encoder(self.shared(tokens))
        decoder_ids = shift_right(labels)
        outputs = self.decoder(self.shared(decoder_ids), source)
        hidden = outputs * 0.04 if self.config.activation == "relu" else outputs
        logits = self.lm_head(hidden)
        with active().computing_loss(logits):
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1)), logits
