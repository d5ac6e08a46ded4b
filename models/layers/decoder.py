"""The layer of most decoders."""

from __future__ import annotations

from functools import partial

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..loop import Heads, LatentHeads
from .attention import Attention
from .latent_attention import LatentAttention
from .mlp import GatedMLP
from .moe import MoE
from .norm import RMSNorm


class DecoderLayer(nnx.Module):
    """Attention, then MLP or experts, each added to the residual stream, with a norm before it, after it, or both."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(RMSNorm, cfg.hidden_size, "embed", cfg, dtype)
        self.attn = (LatentAttention if spec.latent else Attention)(spec, cfg, dtype)
        self.mlp = (MoE if spec.moe else GatedMLP)(spec, cfg, dtype)
        self.has_pre_norms, self.has_post_norms = spec.pre_norms, spec.post_norms
        if spec.pre_norms:
            self.attn_norm, self.mlp_norm = norm(), norm()
        if spec.post_norms:
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()

    def project(self, x_td: Array) -> Heads | LatentHeads:
        """Return what attention takes, from the stream [t, d]."""
        return self.attn.project(self.attn_norm(x_td) if self.has_pre_norms else x_td)

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        """Return the stream after this layer, from what it was before and from what attention gives."""
        if self.has_post_norms:
            x_td = x_td + self.post_attn_norm(self.attn.output(attended_tnh))
            return x_td + self.post_mlp_norm(self.mlp(self._mlp_input(x_td)))
        x_td = self.attn.output(attended_tnh, x_td)
        return self.mlp(self._mlp_input(x_td), x_td)

    def _mlp_input(self, x_td: Array) -> Array:
        return self.mlp_norm(x_td) if self.has_pre_norms else x_td
