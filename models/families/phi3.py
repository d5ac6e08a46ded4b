"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: Llama with several matrices in one tensor, and RoPE for long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_optional_int, require
from ..names import Fused, TensorName
from ..reading import read_decoder, read_num_layers, read_rope, read_rope_settings, read_rope_type
from .llama import LLAMA_NAMES

_QKV, _GATE_UP = "{body}layers.{l}.self_attn.qkv_proj.weight", "{body}layers.{l}.mlp.gate_up_proj.weight"
_PHI3_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.attn.q": TensorName(_QKV, "(n h) d -> n h d", Fused(("q", "k", "v"))),
        "layers.attn.k": TensorName(_QKV, "(k h) d -> k h d", Fused(("q", "k", "v"))),
        "layers.attn.v": TensorName(_QKV, "(k h) d -> k h d", Fused(("q", "k", "v"))),
        "layers.mlp.gate": TensorName(_GATE_UP, "f d -> f d", Fused(("gate", "up"))),
        "layers.mlp.up": TensorName(_GATE_UP, "f d -> f d", Fused(("gate", "up"))),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 32_064,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
# Microsoft's first checkpoints have other names for longrope.
_LONGROPE_NAMES = ("su", "yarn", "longrope")


def _phi3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Phi-3 or Phi-4 config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, attention_bias=False, lm_head_bias=False)
    windows = (read_optional_int(hf, "sliding_window"),) * read_num_layers(hf)
    rope = read_rope(hf, _rope_settings(hf), rotates_part=True)
    return read_decoder(hf, architecture="Phi3ForCausalLM", ropes=(rope,), layers={"window": windows})


def _rope_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    settings = read_rope_settings(hf)
    rope_type = read_rope_type(settings)
    if rope_type not in (*_LONGROPE_NAMES, "default"):
        raise ValueError(f"rope_type is {rope_type!r}, which does not fit this architecture, only longrope")
    return settings | {"rope_type": "default" if rope_type == "default" else "longrope"}


FAMILIES = {"Phi3ForCausalLM": Family(config_from_hf=_phi3_config, names=_PHI3_NAMES)}
