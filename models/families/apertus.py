"""Apertus: Llama with norms of q and k, and an MLP without gate that learns its activation, xIELU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..family import Family
from ..fields import read_bool, require
from ..layers import DecoderLayer, PlainMLP, declare, linear
from ..names import TensorName
from ..reading import read_decoder
from .llama import LLAMA_NAMES

_ACT = "{body}layers.{l}.mlp.act_fn."
_APERTUS_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.attn_norm.scale": TensorName("{body}layers.{l}.attention_layernorm.weight", "d -> d"),
        "layers.mlp_norm.scale": TensorName("{body}layers.{l}.feedforward_layernorm.weight", "d -> d"),
        "layers.mlp.alpha_p": TensorName(_ACT + "alpha_p", "o -> o"),
        "layers.mlp.alpha_n": TensorName(_ACT + "alpha_n", "o -> o"),
        "layers.mlp.beta": TensorName(_ACT + "beta", "->"),
        "layers.mlp.eps": TensorName(_ACT + "eps", "->"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class _LearnedMLP(PlainMLP):
    """The MLP down(xielu(up(x))): above 0 a parabola, below 0 an ELU less x, each by a learned factor, plus beta x."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(spec, cfg, dtype)
        self.alpha_p, self.alpha_n = (declare((1,), ("one",), dtype) for _ in range(2))
        self.beta, self.eps = (declare((), (), dtype) for _ in range(2))

    def __call__(self, x_td: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        return linear(self._xielu(linear(x_td, self.up)), self.down, plus=plus_td)

    def _xielu(self, x_tf: Array) -> Array:
        """Return the activation, computed in float32; the dtype stays."""
        numbers = (each[...].astype(jnp.float32) for each in (self.alpha_p, self.alpha_n, self.beta, self.eps))
        alpha_p, alpha_n, beta, eps = numbers
        x32 = x_tf.astype(jnp.float32)
        above = jax.nn.softplus(alpha_p) * x32 * x32
        below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x32, eps)) - x32)
        return (jnp.where(x32 > 0, above, below) + beta * x32).astype(x_tf.dtype)


class _ApertusLayer(DecoderLayer):
    """A decoder's layer with such an MLP."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(spec, cfg, dtype)
        self.mlp = _LearnedMLP(spec, cfg, dtype)


def _apertus_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an Apertus config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, hidden_act="xielu")
    if hf.get("rope_parameters") is None and hf.get("rope_scaling") is None:
        hf["rope_parameters"] = _ROPE
    bias = read_bool(hf, "attention_bias")
    # The layer has the activation; the config has one of those that need no parameters.
    return read_decoder(
        hf | {"hidden_act": "relu"},
        architecture="ApertusForCausalLM",
        qk_norm=True,
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
    )


FAMILIES = {"ApertusForCausalLM": Family(config_from_hf=_apertus_config, names=_APERTUS_NAMES, layer=_ApertusLayer)}
