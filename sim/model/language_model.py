"""What every model here shares: linear layers, embeddings, and the loss over its logits."""

from __future__ import annotations

from typing import Any, ClassVar

from sim.model import functional as F
from sim.model.calls import Shape, Tensor, active
from sim.model.chunked_loss import backward_per_chunk, loss_per_chunk
from sim.model.config import ModelConfig
from sim.model.module import Module, ModuleList, Parameter

InputShape = tuple[Shape, str]
"""Shape and dtype of what the data loader puts on the device."""


class Linear(Module):
    float8: bool = False
    """torchao has put its Float8Linear in its place."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        self.weight = Parameter(outputs, inputs)
        self.bias = Parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        linear = F.float8_linear if self.float8 else F.linear
        return linear(x, self.weight, self.bias)


class Embedding(Module):
    def __init__(self, count: int, width: int) -> None:
        self.weight = Parameter(count, width)
        self.output_needs_gradient = False

    def forward(self, indices: Tensor) -> Tensor:
        out = F.embedding(indices, self.weight)
        return F.require_gradient(out) if self.output_needs_gradient else out


class LanguageModel(Module):
    """Maps tokens [B, S] to logits [B, S, V]. `layers` are the repeated blocks, which wrappers may replace."""

    layers: ModuleList
    checkpoints_first: ClassVar[bool] = False
    """Which of every k layers is checkpointed: the first, or the last (torchtitan)."""
    first_parts: ClassVar[tuple[str, ...]] = ()
    """What only the first stage of a pipeline has."""
    last_parts: ClassVar[tuple[str, ...]] = ()
    """What only the last stage has. A model that names no parts cannot be cut."""
    returns_logits: ClassVar[bool] = False
    """The script calls the model for logits, its own variable, and then the loss (torchtitan); else one call does both."""

    post_norm: bool = False
    """Nothing stands between the last layer and the head: its gradient comes in through a view, unlike other layers'."""
    passes_keywords: ClassVar[bool] = False
    """Layers are called with one positional argument and the rest by keyword."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def become_stage(self, first_layer: int, is_first: bool, is_last: bool) -> None:
        """Become one stage of a pipeline: parts of other stages become None, layers count from `first_layer`.

        A stage takes the hidden states of the one before in the place of tokens, and gives its own.
        """
        self.layers = ModuleList(self.layers.items, first_layer)
        missing = (() if is_first else self.first_parts) + (() if is_last else self.last_parts)
        for name in missing:
            setattr(self, name, None)
        self.name_paths()

    def stage_output(self, tokens: Tensor) -> Tensor:
        """What a stage before the last hands on, [B, S, H]: a call of the module, with its hooks."""
        return self(tokens)

    def stacks(self) -> tuple[ModuleList, ...]:
        """The repeated blocks: one stack of them, or several that run one after another."""
        return (self.layers,)

    def begin_checkpointing(self) -> None:
        """Some blocks will be checkpointed (transformers' flag of that name)."""

    def inputs(self, sequences: int, seq_len: int, target_len: int) -> tuple[InputShape, InputShape]:
        """Token ids and targets of a micro-batch; `target_len` is of models that read targets beside the sequence."""
        return ((sequences, seq_len), "int64"), ((sequences, seq_len), "int64")

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        """What the training script calls: (loss, logits, whole or chunk by chunk, if it sees them). Here it computes the loss
        from the logits."""
        if self.config.loss_chunks > 1:
            return self._chunked_loss(tokens, targets)
        logits = self(tokens)
        with active().computing_loss(logits):
            return self.loss(logits, targets), logits

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The network up to the final norm: [B, S, H]."""
        raise NotImplementedError

    def project(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        raise NotImplementedError

    def logits_of(self, hidden: Tensor) -> Any:
        """What forward ends with: logits, or those of every chunk where the projection is chunked (torchtune)."""
        if self.config.loss_chunks > 1 and self.config.loss_chunking == "projection":
            return tuple(self.project(piece) for piece in hidden.chunk(self.config.loss_chunks))
        return self.project(hidden)

    def _chunked_loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        """The loss, and what forward returned, whole logits or those of every chunk (None: hidden states)."""
        chunks, kind = self.config.loss_chunks, self.config.loss_chunking
        if kind == "logits":
            logits = self(tokens)
            with active().computing_loss(logits):
                return loss_per_chunk(logits.chunk(chunks), targets.chunk(chunks), self.loss), logits
        if kind == "projection":
            parts: Any = self(tokens)
            with active().computing_loss(*parts):
                return loss_per_chunk(parts, targets.chunk(chunks), self.loss), parts
        hidden = self.hidden_states(tokens)
        with active().computing_loss(hidden):
            return backward_per_chunk(hidden, targets, chunks, self.project, self.loss), None

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """F.cross_entropy over all tokens, as a training script calls it: an fp32 copy dies when it returns."""
        flat = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(flat.float() if self.config.logits == "loss_upcast" else flat, targets.reshape(-1))
