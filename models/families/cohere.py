"""Cohere's Command R, Command R+, Command R7B, Command A and Aya: attention and MLP side by side behind one LayerNorm.

Command R7B and later models have windows with RoPE, and global layers without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_optional_int, require
from ..names import TensorName
from ..reading import (
    every_nth_global,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_rope,
    read_rope_settings,
    windows_of,
)
from .llama import LLAMA_NAMES

_COHERE_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.attn.q_norm.scale": TensorName("{body}layers.{l}.self_attn.q_norm.weight", "n h -> n h"),
        "layers.attn.k_norm.scale": TensorName("{body}layers.{l}.self_attn.k_norm.weight", "k h -> k h"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
_COHERE1_DEFAULTS = {"rope_theta": 500_000.0}
_COHERE2_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4}


def _cohere_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Command R or Command R+; the latter norms each head of q and k by scales of its own."""
    hf = DEFAULTS | _COHERE1_DEFAULTS | dict(hf)
    norms_heads = read_bool(hf, "use_qk_norm")
    return _read("CohereForCausalLM", hf, qk_norm=norms_heads, qk_norm_by_head=norms_heads)


def _cohere2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Command R7B or Command A."""
    hf = DEFAULTS | _COHERE2_DEFAULTS | dict(hf)
    require(hf, use_parallel_block=True, use_gated_activation=True)
    pattern = every_nth_global(read_num_layers(hf), read_int(hf, "sliding_window_pattern"))
    kinds = read_layer_types(hf, pattern)
    window = read_optional_int(hf, "sliding_window")
    rotates = [window is not None and kind == "sliding_attention" for kind in kinds]
    layers = {"window": windows_of(kinds, window), "rope": [0 if each else None for each in rotates]}
    return _read("Cohere2ForCausalLM", hf, layers=layers)


def _read(architecture: str, hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture=architecture,
        ropes=(replace(read_rope(hf, read_rope_settings(hf)), interleaved=True),),
        norm_eps=read_float(hf, "layer_norm_eps"),
        layer_norms=True,
        norm_bias=False,
        parallel=True,
        shares_norm=True,
        logits_divisor=1 / read_float(hf, "logit_scale"),
        qkv_bias=bias,
        o_bias=bias,
        **fields,
    )


FAMILIES = {
    "CohereForCausalLM": Family(config_from_hf=_cohere_config, names=_COHERE_NAMES),
    "Cohere2ForCausalLM": Family(config_from_hf=_cohere2_config, names=_COHERE_NAMES),
}
