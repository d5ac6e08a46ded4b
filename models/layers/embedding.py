"""The embedding of tokens, and the output head."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import ModelConfig
from ..weights import held_by
from .linear import linear
from .params import declare


def soft_cap(x: Array, cap: float | None) -> Array:
    """Squash `x` into (-cap, cap); None leaves it."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Embedding(nnx.Module):
    """A [v, d] matrix that embeds tokens, or computes logits of hidden states, or both; d is the model's by default.

    With `has_bias`, logits have a bias.
    """

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike, size: int | None = None, *, has_bias: bool = False) -> None:
        size = size or cfg.embed_size or cfg.hidden_size
        self.table = declare((cfg.vocab_size, size), ("vocab", "embed"), dtype, 1)
        self.bias = declare((cfg.vocab_size,), ("vocab",), dtype) if has_bias else None
        self.dtype = dtype

    def embed(self, token_ids_t: Array, scale: float) -> Array:
        """Look tokens up, [t, d]; the scale is rounded to the model's dtype first, as in HF."""
        x_td = held_by(self.table)[token_ids_t].astype(self.dtype)
        return x_td if scale == 1.0 else x_td * jnp.asarray(scale, x_td.dtype)

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v]."""
        logits_sv = linear(hidden_sd, self.table, jnp.float32)
        return logits_sv if self.bias is None else logits_sv + self.bias[...].astype(jnp.float32)
