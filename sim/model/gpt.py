"""GPT: a minimal one (nanogpt), as in the recordings. B batch, S sequence, H hidden, A heads, D head dim."""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.language_model import Embedding, LanguageModel, Linear
from sim.model.module import Module, ModuleList, Parameter


class LayerNorm(Module):
    def __init__(self, width: int) -> None:
        self.weight = Parameter(width)
        self.bias = Parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias)


class GptBlock(Module):
    """Pre-norm block with one projection for q, k and v."""

    def __init__(self, config: ModelConfig) -> None:
        h = config.hidden
        self.config = config
        self.ln1 = LayerNorm(h)
        self.qkv = Linear(h, 3 * h, config.bias)
        self.proj = Linear(h, h, config.bias)
        self.ln2 = LayerNorm(h)
        self.fc1 = Linear(h, config.ffn_hidden, config.bias)
        self.fc2 = Linear(config.ffn_hidden, h, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        c = self.config
        q, k, v = self.qkv(self.ln1(x)).split(h)
        q, k, v = (z.view(b, s, c.heads, c.head_dim).transpose(1, 2) for z in (q, k, v))
        kernel = "math" if c.attention == "math" else "sdpa"
        y = F.attention(q, k, v, dropout_p=c.dropout, kernel=kernel)
        y = y.transpose(1, 2).contiguous().view(b, s, h)
        x = x + F.dropout(self.proj(y), c.dropout)
        x = x + F.dropout(self.fc2(F.gelu(self.fc1(self.ln2(x)))), c.dropout)
        return x


class Gpt(LanguageModel):
    """Token and position embeddings, blocks, final norm, head (tied or not)."""

    first_parts = ("wte", "wpe")
    last_parts = ("lnf", "head")
    wte: Embedding | None
    wpe: Embedding | None
    lnf: LayerNorm | None
    head: Linear | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        embedding = self.wte = Embedding(config.vocab, config.hidden)
        self.wpe = Embedding(config.max_positions, config.hidden)
        self.layers = ModuleList([GptBlock(config) for _ in range(config.layers)])
        self.lnf = LayerNorm(config.hidden)
        head = self.head = Linear(config.hidden, config.vocab)
        if config.tied_embeddings:
            head.weight = embedding.weight
        self.name_paths()

    def _residual_stream(self, tokens: Tensor) -> Tensor:
        x = tokens
        if self.wte is not None and self.wpe is not None:
            x = self.wte(tokens) + self.wpe(F.empty((tokens.shape[1],), "int64"))
        for layer in self.layers:
            x = layer(x)
        return x

    def hidden_states(self, tokens: Tensor) -> Tensor:
        assert self.lnf is not None
        return self.lnf(self._residual_stream(tokens))

    def project(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden)

    def forward(self, tokens: Tensor) -> Any:
        x = self._residual_stream(tokens)  # a local until the head has run
        return x if self.head is None or self.lnf is None else self.logits_of(self.lnf(x))
