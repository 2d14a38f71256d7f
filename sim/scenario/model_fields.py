"""Fields of the section `model` that only networks other than causal decoders have."""

from __future__ import annotations

from typing import Literal

from sim.scenario.kinds import Count
from sim.scenario.section import Section


class EncoderFields(Section):
    head: Literal["language_model", "classification"] | None = None
    """BERT: scores of every token over the vocabulary (masked language model, the default), or pooler and classifier over
    the first token."""
    classes: Count | None = None
    """Of a classification head."""
    token_types: Count | None = None
    """BERT: rows of the table of token types. Default: 2."""
