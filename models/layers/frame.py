"""The parts around the layers of most decoders."""

from __future__ import annotations

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import ModelConfig
from ..tokens import TokenBatch
from .embedding import Embedding
from .norm import RMSNorm


class Frame(nnx.Module):
    """The parts around the layers: embedding, last norm, output head."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.embed = Embedding(cfg, dtype)
        self.final_norm = RMSNorm(cfg.hidden_size, "embed", cfg, dtype)
        self.embed_scale, self.tied = cfg.embed_scale, cfg.tie_word_embeddings
        if not cfg.tie_word_embeddings:
            self.lm_head = Embedding(cfg, dtype)

    def start(self, tokens: TokenBatch) -> Array:
        """Return the stream [t, d] that goes into the first layer."""
        return self.embed.embed(tokens.token_ids_t, self.embed_scale)

    def end(self, x_td: Array) -> Array:
        """Return hidden states [t, d] of the stream that comes out of the last layer."""
        return self.final_norm(x_td)

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v]."""
        return (self.embed if self.tied else self.lm_head).logits(hidden_sd)
