"""GLM-4: partial RoPE of neighbours, gate and up in one tensor; those of 2025 also norm what layers add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool
from ..names import Fused, TensorName
from ..reading import read_decoder, read_rope, read_rope_settings
from .llama import LLAMA_NAMES

_GATE_UP = Fused(("gate", "up"))
GLM4_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.post_attn_norm.scale": TensorName("{body}layers.{l}.post_self_attn_layernorm.weight", "d -> d"),
        "layers.post_mlp_norm.scale": TensorName("{body}layers.{l}.post_mlp_layernorm.weight", "d -> d"),
        "layers.mlp.gate": TensorName("{body}layers.{l}.mlp.gate_up_proj.weight", "f d -> f d", _GATE_UP),
        "layers.mlp.up": TensorName("{body}layers.{l}.mlp.gate_up_proj.weight", "f d -> f d", _GATE_UP),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def _glm_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GLM-4 of 2024, such as GLM-4-9B-Chat and GLM-Edge."""
    return _read("GlmForCausalLM", hf)


def _glm4_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GLM-4 of 2025, such as GLM-4-0414 and GLM-Z1."""
    return _read("Glm4ForCausalLM", hf, post_norms=True)


def _read(architecture: str, hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    rope = replace(read_rope(hf, read_rope_settings(hf), rotates_part=True), interleaved=True)
    return read_decoder(
        hf, architecture=architecture, ropes=(rope,), qkv_bias=read_bool(hf, "attention_bias"), **fields
    )


FAMILIES = {
    "GlmForCausalLM": Family(config_from_hf=_glm_config, names=GLM4_NAMES),
    "Glm4ForCausalLM": Family(config_from_hf=_glm4_config, names=GLM4_NAMES),
}
