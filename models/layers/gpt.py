"""The layer of GPT-2 and OPT, and the parts around it, with LayerNorms, an MLP without gate, and learned positions."""

from __future__ import annotations

from functools import partial

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..inputs import TokenBatch
from ..loop import Heads
from .attention import Attention
from .embedding import Embedding
from .linear import linear
from .mlp import GatedMLP, PlainMLP
from .norm import LayerNorm
from .params import declare


class GPTLayer(nnx.Module):
    """Attention and MLP, each added to the stream; norms are on their inputs or, with `norms_stream`, on the sums.

    `mlp` is the class of the MLP.
    """

    def __init__(
        self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike, *, mlp: type[PlainMLP | GatedMLP] = PlainMLP
    ) -> None:
        norm = partial(LayerNorm, cfg.hidden_size, "embed", cfg, dtype)
        self.attn_norm, self.attn = norm(), Attention(spec, cfg, dtype)
        self.mlp_norm, self.mlp = norm(), mlp(spec, cfg, dtype)
        self.norms_stream = spec.norms_stream

    def project(self, x_td: Array) -> Heads:
        """Return the inputs of attention, from the stream [t, d]."""
        return self.attn.project(x_td if self.norms_stream else self.attn_norm(x_td))

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        """Return the stream after this layer, from the stream before it and attention's output."""
        x_td = self.attn.output(attended_tnh, x_td)
        if self.norms_stream:
            x_td = self.attn_norm(x_td)
            return self.mlp_norm(self.mlp(x_td, x_td))
        return self.mlp(self.mlp_norm(x_td), x_td)


class GPTFrame(nnx.Module):
    """The parts around the layers: embeddings of tokens and of positions, final norm, output head.

    If the embedding has another width than the residual stream, it is projected to the stream, and the stream back.
    """

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, rows = cfg.hidden_size, cfg.max_position_embeddings + cfg.position_offset
        self.embed, self.tied = Embedding(cfg, dtype), cfg.tie_word_embeddings
        self.positions = declare((rows, d), ("positions", "embed"), dtype)
        self.position_offset = cfg.position_offset
        self.projects, self.norms = cfg.embed_size is not None, cfg.final_norm
        if cfg.embed_size is not None:
            self.project_in = declare((d, cfg.embed_size), ("embed", "embed"), dtype, 1)
            self.project_out = declare((cfg.embed_size, d), ("embed", "embed"), dtype, 1)
        if cfg.final_norm:
            self.final_norm = LayerNorm(d, "embed", cfg, dtype)
        if not cfg.tie_word_embeddings:
            self.lm_head = Embedding(cfg, dtype)

    def start(self, tokens: TokenBatch) -> Array:
        """Return the stream [t, d] that goes into the first layer."""
        x_td = self.embed.embed(tokens.token_ids_t, 1.0)
        if self.projects:
            x_td = linear(x_td, self.project_in)
        return x_td + self.positions[...][tokens.positions_t + self.position_offset]

    def end(self, x_td: Array) -> Array:
        """Return hidden states [t, d] of the stream that comes out of the last layer."""
        return self.final_norm(x_td) if self.norms else x_td

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v]."""
        if self.projects:
            hidden_sd = linear(hidden_sd, self.project_out)
        return (self.embed if self.tied else self.lm_head).logits(hidden_sd)
