"""Draft heads guess the tokens of another model out of its features: what it computes of each token on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class FeatureSpec(NamedTuple):
    """The features that a draft head reads of each token."""

    layers: tuple[int, ...]
    """Numbers of layers: the features are the residual stream that goes into each of them, side by side in this order,
    and the number of layers stands for the stream that comes out of the last. Empty for the hidden state after the
    final norm."""
    size: int
    """How many numbers a token's features are."""


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """What sets a draft head apart from a model of its own."""

    features: FeatureSpec
    first_layer: int = 0
    """The number that its first layer has in the checkpoint, where its layers come after those of its model."""
    num_guessed_ids: int | None = None
    """How many of the ids it can guess; None for all."""
    norms_stream: bool = False
    """Its residual stream begins with features after their norm, not before it."""
