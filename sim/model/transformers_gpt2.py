"""GPT-2 as transformers 5.24 writes it. B batch, S sequence, H hidden, A heads, D head dim."""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.gpt import LayerNorm
from sim.model.language_model import Embedding, Linear
from sim.model.module import Module, ModuleList, Parameter
from sim.model.transformers_common import TransformersModel, check_packed_sequences, make_position_ids


class Conv1D(Module):
    """A linear layer whose weight is stored [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = Parameter(inputs, outputs)
        self.bias = Parameter(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d_linear(x, self.weight, self.bias)


def gelu_new(x: Tensor) -> Tensor:
    """The tanh form written out: its intermediate results are saved one by one."""
    return 0.5 * x * (1.0 + F.tanh(0.7978845608 * (x + 0.044715 * F.pow3(x))))


class Gpt2Attention(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.c_attn = Conv1D(config.hidden, 3 * config.hidden)
        self.c_proj = Conv1D(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        c = self.config
        q, k, v = self.c_attn(x).split(h)
        k = k.view(b, s, -1, c.head_dim).transpose(1, 2)
        v = v.view(b, s, -1, c.head_dim).transpose(1, 2)
        q = q.view(b, s, -1, c.head_dim).transpose(1, 2)
        y = F.attention(q, k, v, dropout_p=c.dropout, kernel="math" if c.attention == "math" else "sdpa")
        y = y.transpose(1, 2).contiguous()
        y = self.c_proj(y.reshape(b, s, -1).contiguous())
        y = F.dropout(y, c.dropout)
        return y


class Gpt2MLP(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.c_fc = Conv1D(config.hidden, config.ffn_hidden)
        self.c_proj = Conv1D(config.ffn_hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = gelu_new(x) if self.config.activation == "gelu_new" else F.gelu(x)
        x = self.c_proj(x)
        x = F.dropout(x, self.config.dropout)
        return x


class Gpt2Block(Module):
    """One block. The branches stay locals until it returns; the call carries the position ids."""

    def __init__(self, config: ModelConfig) -> None:
        self.ln_1 = LayerNorm(config.hidden)
        self.attn = Gpt2Attention(config)
        self.ln_2 = LayerNorm(config.hidden)
        self.mlp = Gpt2MLP(config)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        residual = x
        x = self.ln_1(x)
        attention = self.attn(x)
        x = attention + residual
        residual = x
        x = self.ln_2(x)
        feed_forward = self.mlp(x)
        return residual + feed_forward


class Gpt2LMHeadModel(TransformersModel):
    """GPT2Model and its head in one module; no attention mask is given, no cache kept."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.wte = Embedding(config.vocab, config.hidden)
        self.wpe = Embedding(config.max_positions, config.hidden)
        self.layers = ModuleList([Gpt2Block(config) for _ in range(config.layers)])
        self.ln_f = LayerNorm(config.hidden)
        self.lm_head = Linear(config.hidden, config.vocab)
        if config.tied_embeddings:
            self.lm_head.weight = self.wte.weight
        self.name_paths()

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """GPT2Model.forward: both embeddings stay locals of it until it returns."""
        embeddings = self.wte(tokens)
        position_ids = make_position_ids(tokens.shape[1])
        positions = self.wpe(position_ids)
        hidden = embeddings + positions
        check_packed_sequences(tokens.shape[0], position_ids)
        hidden = F.dropout(hidden, self.config.dropout)
        for layer in self.layers:
            hidden = layer(hidden, position_ids)
        hidden = self.ln_f(hidden)
        return hidden.view(*hidden.shape)
