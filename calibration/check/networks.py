"""The networks of the check in PyTorch, twins of `sim.model.gpt` and `sim.model.llama`, parameter by parameter.

B batch, S sequence, H hidden, A heads, K key heads, D head dim, F ffn, V vocabulary. What a function's variables hold is
part of the semantics: they are those of the simulated models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sim.model.config import ModelConfig
from sim.scenario.setup import Checkpoint

MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
WEIGHT_STD = 0.02
SAVED = {"aten.mm": (MM,), "aten.addmm": (ADDMM,), "attention": ATTENTION}
"""What a scenario's `checkpoint.save` means here."""


class GptBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, h = c, c.hidden
        self.ln1, self.qkv, self.proj = nn.LayerNorm(h), nn.Linear(h, 3 * h, c.bias), nn.Linear(h, h, c.bias)
        self.ln2 = nn.LayerNorm(h)
        self.fc1, self.fc2 = nn.Linear(h, c.ffn_hidden, c.bias), nn.Linear(c.ffn_hidden, h, c.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(h, dim=2)
        q, k, v = (z.view(b, s, self.c.heads, self.c.head_dim).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, s, h)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Maps tokens [B, S] to logits [B, S, V]."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab, c.hidden), nn.Embedding(c.max_positions, c.hidden)
        self.layers = nn.ModuleList([GptBlock(c) for _ in range(c.layers)])
        self.lnf, self.head = nn.LayerNorm(c.hidden), nn.Linear(c.hidden, c.vocab, bias=False)
        if c.tied_embeddings:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.lnf(x))


def rotate(x: Tensor, cache: Tensor) -> Tensor:
    """x [B, S, A, D] rotated in complex fp32; cache [S, D/2] complex."""
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    c = cache.view(1, cache.shape[0], 1, cache.shape[1])
    return torch.view_as_real(z * c).flatten(3).type_as(x)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """[B, S, K, D] to [B, S, K * times, D] by expand and reshape, which copies."""
    b, s, k, d = x.shape
    return x.unsqueeze(3).expand(b, s, k, times, d).reshape(b, s, k * times, d)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, h, d = c, c.hidden, c.head_dim
        self.wq, self.wk = nn.Linear(h, c.heads * d, bias=False), nn.Linear(h, c.kv_heads * d, bias=False)
        self.wv, self.wo = nn.Linear(h, c.kv_heads * d, bias=False), nn.Linear(c.heads * d, h, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        b, s, _ = x.shape
        c = self.c
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = q.view(b, s, -1, c.head_dim)
        k = k.view(b, s, -1, c.head_dim)
        v = v.view(b, s, -1, c.head_dim)
        q, k = rotate(q, rope), rotate(k, rope)
        if c.kv_heads != c.heads:
            k, v = (repeat_kv(z, c.heads // c.kv_heads) for z in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        h, f = c.hidden, c.ffn_hidden
        self.w1, self.w2 = nn.Linear(h, f, bias=False), nn.Linear(f, h, bias=False)
        self.w3 = nn.Linear(h, f, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(c.hidden, eps=1e-5), nn.RMSNorm(c.hidden, eps=1e-5)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rope)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Maps tokens [B, S] to logits [B, S, V]."""

    rope: Tensor

    def __init__(self, c: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList([LlamaBlock(c) for _ in range(c.layers)])
        self.norm, self.output = nn.RMSNorm(c.hidden, eps=1e-5), nn.Linear(c.hidden, c.vocab, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angles = torch.outer(torch.arange(seq_len).float(), frequencies)
        self.register_buffer("rope", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.rope)
        h = self.norm(h)
        return self.output(h)


def loss_of(logits: Tensor, targets: Tensor, upcasts: bool) -> Tensor:
    """F.cross_entropy over all tokens, of fp32 logits where it `upcasts` them."""
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat.float() if upcasts else flat, targets.reshape(-1))


class Region(nn.Module):
    """One or several layers under torch.utils.checkpoint."""

    def __init__(self, layers: Iterable[nn.Module], keep: tuple[Any, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.options: dict[str, Any] = {}
        if keep:
            self.options["context_fn"] = lambda: create_selective_checkpoint_contexts(list(keep))

    def run(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x

    def forward(self, *arguments: Tensor) -> Tensor:
        function: Callable[..., Tensor] = self.layers[0] if len(self.layers) == 1 else self.run
        result: Tensor = checkpoint(function, *arguments, use_reentrant=False, **self.options)
        return result


def apply_checkpoint(model: nn.Module, form: Checkpoint | None) -> None:
    """Wrap layers as the set-up says: every k-th segment, with the operators that it keeps."""
    if form is None:
        return
    keep = tuple(operator for name in form.save for operator in SAVED[name])
    layers: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]
    wrapped: list[nn.Module] = []
    for number, start in enumerate(range(0, len(layers), form.segment)):
        part = layers[start : start + form.segment]
        chosen = number % form.every == form.every - 1
        wrapped.extend([Region(part, keep)] if chosen else part)
    model.layers = nn.ModuleList(wrapped)


def build(c: ModelConfig, seq_len: int) -> nn.Module:
    """The network with weights as GPT-2 draws them: with larger ones (an embedding's default) softmax underflows, and a
    processor takes twice as long over numbers so small that they are denormal."""
    model = Gpt(c) if c.family == "gpt" else Llama(c, seq_len)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=WEIGHT_STD)
    return model
