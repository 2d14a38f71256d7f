"""The networks of the measurements under shared/data/pytorch, as their probes wrote them (oracle/cpu/common.py).

b batch, n sequence, h hidden, a heads, kv key heads, d head dim. Python locals are those of the probes.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor as ModelTensor
from sim.model.calls import call
from sim.model.gpt import LayerNorm
from sim.model.language_model import Embedding, Linear
from sim.model.module import Module, ModuleList, Parameter
from sim.runtime.regions import blocks_of


class GptBlock(Module):
    """common.py's GPTBlock with attn="sdpa", or "math": written out, with a mask."""

    def __init__(self, hidden: int, heads: int, dropout: float, written_out: bool) -> None:
        self.heads, self.dropout, self.written_out = heads, dropout, written_out
        self.ln1, self.qkv, self.proj = (
            LayerNorm(hidden),
            Linear(hidden, 3 * hidden, True),
            Linear(hidden, hidden, True),
        )
        self.ln2 = LayerNorm(hidden)
        self.fc, self.out = Linear(hidden, 4 * hidden, True), Linear(4 * hidden, hidden, True)

    def attention(self, x: ModelTensor) -> ModelTensor:
        b, n, h = x.shape
        d = h // self.heads
        q, k, v = self.qkv(x).split(h)
        q = q.view(b, n, self.heads, d).transpose(1, 2)
        k = k.view(b, n, self.heads, d).transpose(1, 2)
        v = v.view(b, n, self.heads, d).transpose(1, 2)
        if self.written_out:
            w = call("div", call("matmul", q, k.transpose(-2, -1)))
            mask = call("causal_mask", n)
            w = call("hide", w, mask)
            w = F.softmax(w)
            w = F.dropout(w, self.dropout)
            y = call("matmul", w, v)
        else:
            y = F.attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, h))

    def forward(self, x: ModelTensor) -> ModelTensor:
        x = x + F.dropout(self.attention(self.ln1(x)), self.dropout)
        return x + F.dropout(self.out(F.gelu(self.fc(self.ln2(x)))), self.dropout)


class CpuGpt(Module):
    """common.py's GPT: the script's locals are those of its forward."""

    def __init__(self, layers: int = 8, vocab: int = 1024, written_out: bool = False) -> None:
        hidden, heads, length = 256, 4, 256
        self.vocab = vocab
        self.wte, self.wpe = Embedding(vocab, hidden), Embedding(length, hidden)
        self.layers = ModuleList([GptBlock(hidden, heads, 0.1, written_out) for _ in range(layers)])
        self.lnf, self.head = LayerNorm(hidden), Linear(hidden, vocab)
        self.name_paths()

    def run(self, x: ModelTensor) -> ModelTensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: ModelTensor, targets: ModelTensor) -> ModelTensor:
        positions = F.empty((tokens.shape[1],), "int64")
        x = self.wte(tokens) + self.wpe(positions)
        x = self.run(x)
        logits = self.head(self.lnf(x))
        logits = logits.float()
        return F.cross_entropy(logits.view(-1, self.vocab), targets.view(-1))


class RmsNorm(Module):
    """nn.RMSNorm, which a CPU runs as a composite in fp32, weight and all."""

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width)

    def forward(self, x: ModelTensor) -> ModelTensor:
        wide = x.float()
        root = (wide.square().mean_last() + 1e-5).rsqrt()
        result = wide * root
        result = F.scale_by(result, self.weight)
        return result.to(x.dtype)


def rotate_half(x: ModelTensor) -> ModelTensor:
    a, b = x.split(x.shape[-1] // 2)
    return F.cat_last((-b, a))


class LlamaBlock(Module):
    """common.py's LlamaBlock: RMSNorm, rotary positions as transformers', repeated keys."""

    rope: tuple[ModelTensor, ModelTensor]

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        d = self.head_dim
        self.n1, self.wq = RmsNorm(hidden), Linear(hidden, heads * d)
        self.wk, self.wv = Linear(hidden, kv_heads * d), Linear(hidden, kv_heads * d)
        self.wo, self.n2 = Linear(heads * d, hidden), RmsNorm(hidden)
        self.w1, self.w3, self.w2 = Linear(hidden, ffn), Linear(hidden, ffn), Linear(ffn, hidden)

    def attention(self, x: ModelTensor, cos: ModelTensor, sin: ModelTensor) -> ModelTensor:
        b, n, _ = x.shape
        a, kv, d = self.heads, self.kv_heads, self.head_dim
        q = self.wq(x).view(b, n, a, d).transpose(1, 2)
        k = self.wk(x).view(b, n, kv, d).transpose(1, 2)
        v = self.wv(x).view(b, n, kv, d).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k = k.unsqueeze(2).expand(b, kv, a // kv, n, d).reshape(b, a, n, d)
        v = v.unsqueeze(2).expand(b, kv, a // kv, n, d).reshape(b, a, n, d)
        y = F.attention(q, k, v)
        return self.wo(y.transpose(1, 2).reshape(b, n, a * d))

    def forward(self, x: ModelTensor) -> ModelTensor:
        h = x + self.attention(self.n1(x), *self.rope)
        y = self.n2(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class CpuLlama(Module):
    """common.py's Llama; its regions take the hidden states alone."""

    def __init__(self, layers: int = 8, vocab: int = 1024) -> None:
        hidden, heads = 256, 8
        self.vocab = vocab
        self.emb = Embedding(vocab, hidden)
        self.layers = ModuleList([LlamaBlock(hidden, heads, 2, 896) for _ in range(layers)])
        self.norm, self.head = RmsNorm(hidden), Linear(hidden, vocab)
        self.rope_shape = (256, hidden // heads)
        self.name_paths()

    def place(self) -> None:
        """The buffers, which are static."""
        rope = (F.empty(self.rope_shape, "bf16"), F.empty(self.rope_shape, "bf16"))
        for layer in self.layers:
            for block in blocks_of(layer):
                vars(block)["rope"] = rope

    def run(self, x: ModelTensor) -> ModelTensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: ModelTensor, targets: ModelTensor) -> ModelTensor:
        x = self.emb(tokens)
        x = self.run(x)
        return F.cross_entropy(self.head(self.norm(x)).float().view(-1, self.vocab), targets.view(-1))
