"""LFM3: LFM2 with windows, a gate for each head, and norms around both parts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_optional_int
from ..names import TensorName
from ..reading import LAYER_TYPES, read_layer_types, read_num_layers, read_ropes_by_type, windows_of
from .lfm2 import DEFAULTS as LFM2_DEFAULTS
from .lfm2 import LFM2_NAMES, read_hybrid
from .llama import LLAMA_NAMES

_OF_ATTENTION = ("o", "o_bias", "q_norm.scale", "k_norm.scale")

_LFM3_NAMES = MappingProxyType(
    {
        **LFM2_NAMES,
        **{f"layers.attn.{name}": LLAMA_NAMES[f"layers.attn.{name}"] for name in _OF_ATTENTION},
        "layers.attn.gate": TensorName("{body}layers.{l}.self_attn.gate_proj.weight", "n d -> n d"),
        "layers.post_attn_norm.scale": TensorName("{body}layers.{l}.post_operator_norm.weight", "d -> d"),
        "layers.post_mlp_norm.scale": TensorName("{body}layers.{l}.post_ffn_norm.weight", "d -> d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = LFM2_DEFAULTS | {
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    },
}


def _lfm3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an LFM3 config.json."""
    hf = DEFAULTS | dict(hf)
    types = read_layer_types(hf, tuple(map(_default_type, range(read_num_layers(hf)))), ("conv", *LAYER_TYPES))
    ropes, rope_of = read_ropes_by_type(hf, types, 1_000_000.0, 10_000.0)
    bias, has_gate = read_bool(hf, "attention_bias"), read_bool(hf, "use_attention_gate")
    return read_hybrid(
        hf,
        types,
        architecture="Lfm3ForCausalLM",
        ropes=ropes,
        qkv_bias=bias,
        o_bias=bias,
        output_gate=has_gate,
        gate_by_head=has_gate,
        post_norms=read_bool(hf, "use_sandwich_norm"),
        layers={"rope": rope_of, "window": windows_of(types, read_optional_int(hf, "sliding_window"))},
    )


def _default_type(layer: int) -> str:
    """Return the type of a layer: of four, one attends globally, and one, but not the first, in a window."""
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer > 0 else "conv"


FAMILIES = {"Lfm3ForCausalLM": Family(config_from_hf=_lfm3_config, names=_LFM3_NAMES)}
