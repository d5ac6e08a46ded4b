"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side behind one LayerNorm, partial RoPE, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float
from ..names import TensorName, plain_mlp_names
from ..reading import read_decoder
from .llama import LLAMA_NAMES

_ATTENTION, _MLP = "{body}layers.{l}.self_attn.", "{body}layers.{l}.mlp."
_PHI_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "final_norm.scale": TensorName("{body}final_layernorm.weight", "d -> d"),
        "final_norm.bias": TensorName("{body}final_layernorm.bias", "d -> d"),
        "layers.attn.o": TensorName(_ATTENTION + "dense.weight", "d c -> d c"),
        "layers.attn.o_bias": TensorName(_ATTENTION + "dense.bias", "d -> d"),
        "layers.attn.q_norm.scale": TensorName(_ATTENTION + "q_layernorm.weight", "h -> h"),
        "layers.attn.q_norm.bias": TensorName(_ATTENTION + "q_layernorm.bias", "h -> h"),
        "layers.attn.k_norm.scale": TensorName(_ATTENTION + "k_layernorm.weight", "h -> h"),
        "layers.attn.k_norm.bias": TensorName(_ATTENTION + "k_layernorm.bias", "h -> h"),
        **plain_mlp_names(_MLP + "fc1", _MLP + "fc2"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}


def _phi_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Phi-1 or Phi-2 config.json."""
    hf = DEFAULTS | dict(hf)
    return read_decoder(
        hf,
        architecture="PhiForCausalLM",
        norm_eps=read_float(hf, "layer_norm_eps"),
        rotates_part=True,
        layer_norms=True,
        parallel=True,
        shares_norm=True,
        gated=False,
        qk_norm=read_bool(hf, "qk_layernorm"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


FAMILIES = {"PhiForCausalLM": Family(config_from_hf=_phi_config, names=_PHI_NAMES)}
