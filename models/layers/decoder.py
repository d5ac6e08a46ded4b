"""The layer of most decoders."""

from __future__ import annotations

from functools import partial
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..loop import Heads, LatentHeads
from .attention import Attention
from .latent_attention import LatentAttention
from .mlp import GatedMLP, PlainMLP
from .moe import MoE
from .norm import LayerNorm, RMSNorm, make_norm
from .recurrent import StateInputs, make_recurrent


class DecoderLayer(nnx.Module):
    """Attention, then MLP or experts, each added to the residual stream, with a norm before it, after it, or both.

    With `parallel`, both take the stream as it comes into the layer.
    A recurrent state may take the place of attention. A layer may have one of the two parts alone.
    """

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(make_norm, cfg.hidden_size, "embed", cfg, dtype)
        self.has_mixer, self.has_mlp, self.has_state = spec.has_mixer, spec.has_mlp, spec.state is not None
        self.has_pre_norms, self.has_post_norms = spec.pre_norms, spec.post_norms
        self.residual_scale, self.is_parallel = spec.residual_scale, spec.parallel
        if spec.has_mixer:
            if self.has_state:
                self.recurrent = make_recurrent(spec, cfg, dtype)
            else:
                self.attn = (LatentAttention if spec.latent else Attention)(spec, cfg, dtype)
            self.attn_norm = norm() if spec.pre_norms else None
            self.post_attn_norm = norm() if spec.post_norms else None
        if spec.has_mlp:
            self.mlp = (MoE if spec.moe else GatedMLP if spec.gated else PlainMLP)(spec, cfg, dtype)
            self.shares_norm = spec.shares_norm
            self.mlp_norm = norm() if spec.pre_norms and not spec.shares_norm else None
            self.post_mlp_norm = norm() if spec.post_norms else None

    @property
    def _mixer(self) -> Any:
        return self.recurrent if self.has_state else self.attn

    def project(self, x_td: Array) -> Heads | LatentHeads | StateInputs | None:
        """Return the inputs of attention or of the recurrent state, from the stream [t, d]; None without either."""
        if not self.has_mixer:
            return None
        return self._mixer.project(x_td if self.attn_norm is None else self.attn_norm(x_td))

    def finish(self, x_td: Array, attended_tnh: Any) -> Array:
        """Return the stream after this layer, from the stream before it and attention's output.

        The output is None in a layer without attention and recurrent state.
        """
        start_td = x_td
        if self.has_mixer:
            x_td = self._add(x_td, partial(self._mixer.output, attended_tnh), self.post_attn_norm)
        if not self.has_mlp:
            return x_td
        mlp_norm = self.attn_norm if self.shares_norm else self.mlp_norm
        mlp_input_td = start_td if self.is_parallel else x_td
        if mlp_norm is not None:
            mlp_input_td = mlp_norm(mlp_input_td)
        return self._add(x_td, partial(self.mlp, mlp_input_td), self.post_mlp_norm)

    def _add(self, x_td: Array, part: partial[Array], post_norm: LayerNorm | RMSNorm | None) -> Array:
        """Return the stream plus a part's output. The part adds it itself unless it is normed or scaled first."""
        if post_norm is not None:
            return x_td + post_norm(part())
        return part(x_td) if self.residual_scale == 1.0 else x_td + self.residual_scale * part()
