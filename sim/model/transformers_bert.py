"""BERT as transformers 5.24 writes it: post-norm encoder, all tokens see all. B batch, S sequence, H hidden, V vocabulary.

No attention mask is given (or one without padding, which SDPA is not shown), no token types either: a buffer's zeros.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.gpt import LayerNorm
from sim.model.language_model import Embedding, InputShape, Linear
from sim.model.module import Buffer, Module, ModuleList, Parameter
from sim.model.transformers_attention import Attended, attend, split_weights, with_weights
from sim.model.transformers_common import TransformersModel


class BertEmbeddings(Module):
    """Words, token types and positions, added in this order; each stays a local until the end."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.word_embeddings = Embedding(config.vocab, config.hidden)
        self.position_embeddings = Embedding(config.max_positions, config.hidden)
        self.token_type_embeddings = Embedding(config.token_types, config.hidden)
        self.LayerNorm = LayerNorm(config.hidden)
        self.position_ids = Buffer("int64", 1, config.max_positions)
        self.token_type_ids = Buffer("int64", 1, config.max_positions)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.position_ids.tensor is not None
        batch, length = tokens.shape
        position_ids = self.position_ids.tensor.narrow(1, 0, length)
        types = F.compute("gather", (1, length), "int64", position_ids)
        words = self.word_embeddings(tokens)
        type_embeddings = self.token_type_embeddings(types.expand(batch, length))
        x = words + type_embeddings
        places = self.position_embeddings(position_ids)
        x = x + places
        x = self.LayerNorm(x)
        x = F.dropout(x, self.config.dropout)
        return x


class BertSelfAttention(Module):
    def __init__(self, config: ModelConfig) -> None:
        h, width = config.hidden, config.heads * config.head_dim
        self.config = config
        self.query, self.key, self.value = (Linear(h, width, bias=True) for _ in range(3))

    def forward(self, x: Tensor) -> Attended:
        b, s, _ = x.shape
        d = self.config.head_dim
        q = self.query(x).view(b, s, -1, d).transpose(1, 2)
        k = self.key(x).view(b, s, -1, d).transpose(1, 2)
        v = self.value(x).view(b, s, -1, d).transpose(1, 2)
        y, weights = attend(q, k, v, self.config)
        y = y.reshape(b, s, -1).contiguous()
        return with_weights(y, weights)


class BertOutput(Module):
    """Projection, dropout, residual, norm: behind attention (BertSelfOutput) and behind the MLP."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        self.config = config
        self.dense = Linear(inputs, config.hidden, bias=True)
        self.LayerNorm = LayerNorm(config.hidden)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        x = F.dropout(x, self.config.dropout)
        x = self.LayerNorm(x + residual)
        return x


class BertAttention(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config.heads * config.head_dim, config)

    def forward(self, x: Tensor) -> Attended:
        y, weights = split_weights(self.self(x))
        y = self.output(y, x)
        return with_weights(y, weights)


class BertIntermediate(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.dense = Linear(config.hidden, config.ffn_hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = F.gelu(x)
        return x


class BertLayer(Module):
    """The attention's weights, where they exist, stay a local until the layer returns."""

    def __init__(self, config: ModelConfig) -> None:
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config.ffn_hidden, config)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = split_weights(self.attention(x))
        wide = self.intermediate(y)
        y = self.output(wide, y)
        del weights
        return y


class BertPooler(Module):
    """tanh(W x + b) of the first token."""

    def __init__(self, config: ModelConfig) -> None:
        self.dense = Linear(config.hidden, config.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        first = x.select(1, 0)
        pooled = self.dense(first)
        pooled = F.tanh(pooled)
        return pooled


class PredictionHeadTransform(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.dense = Linear(config.hidden, config.hidden, bias=True)
        self.LayerNorm = LayerNorm(config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = F.gelu(x)
        x = self.LayerNorm(x)
        return x


class LMPredictionHead(Module):
    """Its bias is its own parameter, shared with the decoder, whose weight is the word embeddings'."""

    def __init__(self, config: ModelConfig, words: Parameter) -> None:
        self.transform = PredictionHeadTransform(config)
        self.decoder = Linear(config.hidden, config.vocab, bias=True)
        self.bias = self.decoder.bias  # its own parameter first
        if config.tied_embeddings:
            self.decoder.weight = words

    def forward(self, x: Tensor) -> Tensor:
        x = self.transform(x)
        x = self.decoder(x)
        return x


class BertModel(TransformersModel):
    """BertModel and the head in one module."""

    post_norm = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.layers = ModuleList([BertLayer(config) for _ in range(config.layers)])

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The embeddings stay a local of BertModel.forward until it returns."""
        embedded = self.embeddings(tokens)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class BertForMaskedLM(BertModel):
    """Scores of every token; the loss runs in their own dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.predictions = LMPredictionHead(config, self.embeddings.word_embeddings.weight)
        self.name_paths()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden_states(tokens)
        scores = self.predictions(hidden)
        with active().computing_loss(scores):
            return F.cross_entropy(scores.view(-1, self.config.vocab), labels.view(-1)), scores


class BertForSequenceClassification(BertModel):
    """Pooler, dropout and a linear layer over the first token; one label per sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.pooler = BertPooler(config)
        self.classifier = Linear(config.hidden, config.classes, bias=True)
        self.name_paths()

    def inputs(self, sequences: int, seq_len: int, target_len: int) -> tuple[InputShape, InputShape]:
        return ((sequences, seq_len), "int64"), ((sequences,), "int64")

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden_states(tokens)
        outputs = hidden, self.pooler(hidden)  # held to the end
        pooled = F.dropout(outputs[1], self.config.dropout)
        logits = self.classifier(pooled)
        with active().computing_loss(logits):
            return F.cross_entropy(logits.view(-1, self.config.classes), labels.view(-1)), logits
