"""The parts around the layers, of most decoders and of encoders: embedding, final norm, output head."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import ModelConfig
from ..inputs import TokenBatch
from .embedding import Embedding
from .norm import LayerNorm, make_norm
from .params import declare


class Frame(nnx.Module):
    """The parts around a decoder's layers: embedding, final norm, output head."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.embed = Embedding(cfg, dtype)
        self.final_norm = make_norm(cfg.hidden_size, "embed", cfg, dtype)
        self.embed_scale, self.tied = cfg.embed_scale, cfg.tie_word_embeddings
        if not cfg.tie_word_embeddings:
            self.lm_head = Embedding(cfg, dtype, has_bias=cfg.head_bias)
        for layer in cfg.layers:
            if layer.rope is not None and cfg.ropes[layer.rope].learned:
                self.rope_exponents = declare((layer.rope_dim // 2,), ("head_dim",), jnp.float32)

    def start(self, tokens: TokenBatch) -> Array:
        """Return the stream [t, d] that goes into the first layer."""
        return self.embed.embed(tokens.token_ids_t, self.embed_scale)

    def end(self, x_td: Array) -> Array:
        """Return hidden states [t, d] of the stream that comes out of the last layer."""
        return self.final_norm(x_td)

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v]."""
        return (self.embed if self.tied else self.lm_head).logits(hidden_sd)


class EncoderFrame(nnx.Module):
    """The parts around an encoder's layers: the normed sum of embeddings, and the final norm. It has no output head.

    The embeddings are those of tokens, of positions unless layers use RoPE or distances, and of token types if there
    are some.
    """

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d = cfg.hidden_size
        self.embed, self.embed_norm = Embedding(cfg, dtype), LayerNorm(d, "embed", cfg, dtype)
        self.position_offset = cfg.position_offset
        relative = cfg.layers[0].relative
        self.has_positions, self.has_types = not cfg.ropes and relative is None, cfg.num_token_types > 0
        if relative is not None:
            self.distances = declare((2 * relative.num_buckets, d), ("positions", "embed"), dtype)
            self.distance_norm = LayerNorm(d, "embed", cfg, dtype)
        if self.has_positions:
            rows = cfg.max_position_embeddings + cfg.position_offset
            self.positions = declare((rows, d), ("positions", "embed"), dtype)
        if self.has_types:
            self.types = declare((cfg.num_token_types, d), ("types", "embed"), dtype)
        self.final_norm = LayerNorm(d, "embed", cfg, dtype) if cfg.final_norm else None

    def start(self, tokens: TokenBatch, added_td: Array | None = None) -> Array:
        """Return the stream [t, d] that goes into the first layer; `added_td` is added to the embeddings."""
        x_td = self.embed.embed(tokens.token_ids_t, 1.0)
        if added_td is not None:
            x_td = x_td + added_td
        if self.has_types:
            x_td = x_td + self.types[...][tokens.type_ids_t]
        if self.has_positions:
            x_td = x_td + self.positions[...][tokens.positions_t + self.position_offset]
        return self.embed_norm(x_td)

    def distance_states(self) -> Array:
        """Return the states [r, d] of distances, which layers make keys and queries of."""
        return self.distance_norm(self.distances[...])

    def end(self, x_td: Array) -> Array:
        """Return hidden states [t, d] of the stream that comes out of the last layer."""
        return x_td if self.final_norm is None else self.final_norm(x_td)
