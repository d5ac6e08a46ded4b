"""The layer of most decoders."""

from __future__ import annotations

from functools import partial
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import Factors, LayerSpec, ModelConfig
from ..loop import Beside, Heads, LatentHeads
from .attention import Attention
from .latent_attention import LatentAttention
from .mlp import GatedMLP, PlainMLP
from .moe import MoE
from .norm import LayerNorm, RMSNorm, make_norm
from .recurrent import StateInputs, make_recurrent


class DecoderLayer(nnx.Module):
    """Attention, then MLP or experts, each added to the residual stream, with a norm before it, after it, or both.

    With `parallel`, both take the stream as it comes into the layer.
    A recurrent state may take the place of attention, or be beside it. A layer may have one of the two parts alone.
    """

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(make_norm, cfg.hidden_size, "embed", cfg, dtype)
        self.has_mixer, self.has_mlp, self.attends = spec.has_mixer, spec.has_mlp, spec.attends
        self.has_state = spec.has_mixer and spec.state is not None
        self.has_pre_norms, self.has_post_norms = spec.pre_norms, spec.post_norms
        self.attention_factors, self.state_factors = spec.attention_factors, spec.state_factors
        self.mlp_factors = spec.mlp_factors
        self.residual_scale, self.is_parallel = spec.residual_scale, spec.parallel
        if spec.has_mixer:
            if self.has_state:
                self.recurrent = make_recurrent(spec, cfg, dtype)
            if self.attends:
                self.attn = (LatentAttention if spec.latent else Attention)(spec, cfg, dtype)
            self.attn_norm = norm() if spec.pre_norms else None
            self.post_attn_norm = norm() if spec.post_norms else None
        if spec.has_mlp:
            self.mlp = (MoE if spec.moe else GatedMLP if spec.gated else PlainMLP)(spec, cfg, dtype)
            self.shares_norm = spec.shares_norm
            self.mlp_norm = norm() if spec.pre_norms and not spec.shares_norm else None
            self.post_mlp_norm = norm() if spec.post_norms else None

    @property
    def _mixers(self) -> list[tuple[Any, Factors]]:
        """Return attention and the recurrent state, the ones that the layer has, with their factors."""
        attention = [(self.attn, self.attention_factors)] if self.attends else []
        return [*attention, *([(self.recurrent, self.state_factors)] if self.has_state else [])]

    def project(self, x_td: Array) -> Heads | LatentHeads | StateInputs | Beside | None:
        """Return the inputs of attention or of the recurrent state, from the stream [t, d]; None without either."""
        if not self.has_mixer:
            return None
        x_td = x_td if self.attn_norm is None else self.attn_norm(x_td)
        inputs = [mixer.project(_times(x_td, factors.taken)) for mixer, factors in self._mixers]
        return Beside(*inputs) if len(inputs) > 1 else inputs[0]

    def finish(self, x_td: Array, attended_tnh: Any) -> Array:
        """Return the stream after this layer, from the stream before it and attention's output.

        The output is None in a layer without attention and recurrent state.
        """
        start_td = x_td
        outputs = attended_tnh if isinstance(attended_tnh, Beside) else [attended_tnh]
        if self.has_mixer:
            for (mixer, factors), output in zip(self._mixers, outputs, strict=True):
                x_td = self._add(x_td, partial(mixer.output, output), self.post_attn_norm, factors)
        if not self.has_mlp:
            return x_td
        mlp_norm = self.attn_norm if self.shares_norm else self.mlp_norm
        mlp_input_td = start_td if self.is_parallel else x_td
        if mlp_norm is not None:
            mlp_input_td = mlp_norm(mlp_input_td)
        mlp_input_td = _times(mlp_input_td, self.mlp_factors.taken)
        return self._add(x_td, partial(self.mlp, mlp_input_td), self.post_mlp_norm, self.mlp_factors)

    def _add(self, x_td: Array, part: partial[Array], post_norm: LayerNorm | RMSNorm | None, factors: Factors) -> Array:
        """Return the stream plus a part's output. The part adds it itself unless it is normed or scaled first."""
        if post_norm is not None:
            return x_td + post_norm(part())
        factor = self.residual_scale * factors.added
        return part(x_td) if factor == 1.0 else x_td + factor * part()


def _times(x_td: Array, factor: float) -> Array:
    return x_td if factor == 1.0 else factor * x_td
