"""Fields of the section `model` that few networks have: encoders, and long sequences in tiles."""

from __future__ import annotations

from typing import Literal

from sim.scenario.kinds import Count
from sim.scenario.section import Section


class TiledFields(Section):
    """What is computed tile by tile of long sequences."""

    mlp_tiles: Count | None = None
    """transformers' Llama: the MLP runs in so many tiles of tokens and once more in backward, tile by tile (DeepSpeed's
    TiledMLP; ALST takes tokens of a rank / hidden, rounded up). Default: 1, all tokens at once."""


class EncoderFields(Section):
    decoder_layers: Count | None = None
    """T5: blocks of the decoder; `layers` are those of the encoder."""
    relative_buckets: Count | None = None
    """T5: rows of the table of biases by distance. Default: 32."""
    image_size: Count | None = None
    """ViT: pixels of a side of the square images, which have three colours."""
    patch_size: Count | None = None
    """ViT: pixels of a side of a patch; must divide `image_size`. An image has (image_size / patch_size)^2 + 1 tokens."""
    head: Literal["language_model", "classification", "pretraining"] | None = None
    """BERT: scores of every token over the vocabulary (masked language model, the default), or pooler and classifier over
    the first token; with implementation megatron pretraining, both (the order of two sentences)."""
    classes: Count | None = None
    """Of a classification head. Default for ViT: 1000."""
    token_types: Count | None = None
    """BERT: rows of the table of token types. Default: 2."""
