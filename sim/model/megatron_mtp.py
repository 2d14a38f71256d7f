"""Multi-token prediction as Megatron adds it behind the last layer (DeepSeek-V3): further layers, each of which predicts
one token more from what the one before handed on and the embedding of the next token.

Letters as in megatron_layer. Code: megatron-core 0.16, transformer/multi_token_prediction.py, read there; no recording.
Each layer's logits go through the model's own head; their loss rides on the hidden states that the head sees.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.megatron_latent import DuplicatedLinear
from sim.model.megatron_layer import make_norm
from sim.model.module import Module
from sim.model.shard.tensor import TensorParallel
from sim.model.transformer_engine import Fp8WholeLinear


class PredictionLayer(Module):
    """Norms of both inputs, a product of the two joined, a transformer layer, a norm: [S, B, H] to the same.

    Megatron splits the product by columns and gathers; here each rank applies it whole to its tokens, which is as much work.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, layer: Module) -> None:
        h, fp8 = config.hidden, config.fp8
        self.enorm = make_norm(config, parallel)
        self.hnorm = make_norm(config, parallel)
        whole = DuplicatedLinear(2 * h, h, parallel) if fp8 is None else Fp8WholeLinear(2 * h, h, parallel, fp8)
        self.eh_proj: Module = whole
        self.transformer_layer = layer
        self.final_layernorm = make_norm(config, parallel)

    def forward(self, x: Tensor, embedded: Tensor, *rope: Tensor) -> Tensor:
        joined = F.cat_last((self.enorm(embedded), self.hnorm(x)))
        x = self.transformer_layer(self.eh_proj(joined), *rope)
        return self.final_layernorm(x)


class MultiTokenPrediction(Module):
    """`embedding`: of its own where the model's is on another stage, else it shares the table."""

    def __init__(self, embedding: Module, layers: list[PredictionLayer]) -> None:
        self.embedding = embedding
        self.count = len(layers)
        for number, layer in enumerate(layers):
            setattr(self, f"layer{number}", layer)

    def forward(self, x: Tensor, targets: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
        """Hidden states of every depth; tokens are the targets, moved on by one more at each."""
        found, tokens = [], targets
        for number in range(self.count):
            embedded = self.embedding(tokens, F.empty(tokens.shape, "int64"))
            x = vars(self)[f"layer{number}"](x, embedded, *rope)
            found.append(x)
            tokens = F.compute("aten::roll", tokens.shape, tokens.dtype, tokens)
        return tuple(found)
