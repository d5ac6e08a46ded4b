"""ERNIE 4.5: Llama with RoPE of neighbours; the larger ones have experts with a correction, and shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..names import TensorName
from ..reading import read_decoder, read_num_layers, read_rope, read_rope_settings
from .glm4_moe import GLM4_MOE_NAMES
from .llama import LLAMA_NAMES

_ERNIE4_5_MOE_NAMES = MappingProxyType(
    {
        **GLM4_MOE_NAMES,
        "layers.mlp.router.correction": TensorName(
            "{body}layers.{l}.mlp.moe_statics.e_score_correction_bias", "1 e -> e"
        ),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
_DENSE_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128}
_MOE_DEFAULTS = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
# Far below the sum of a token's chosen scores, which HF divides by nothing smaller than `moe_norm_min`.
_SMALL = 1e-6


def _ernie4_5_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an ERNIE 4.5 config.json."""
    hf = DEFAULTS | _DENSE_DEFAULTS | dict(hf)
    bias = read_bool(hf, "use_bias")
    return _read("Ernie4_5ForCausalLM", hf, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def _ernie4_5_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of an ERNIE 4.5 with experts."""
    hf = DEFAULTS | _MOE_DEFAULTS | dict(hf)
    require(hf, use_bias=False)
    if read_float(hf, "moe_norm_min") > _SMALL:
        raise ValueError(f"moe_norm_min is {hf['moe_norm_min']}, expected {_SMALL} at most")
    width, num_shared = read_int(hf, "moe_intermediate_size"), read_int(hf, "moe_num_shared_experts", minimum=0)
    moe = MoESpec(
        num_experts=read_int(hf, "moe_num_experts"),
        top_k=read_int(hf, "moe_k"),
        intermediate_size=width,
        correction_bias=True,
        normalizes=True,
        shared_size=width * num_shared or None,
    )
    num_layers, interval = read_num_layers(hf), read_int(hf, "moe_layer_interval")
    first, last = read_int(hf, "moe_layer_start_index", minimum=0), read_int(hf, "moe_layer_end_index", minimum=-1)
    sparse = range(first, num_layers if last == -1 else last + 1)
    has_experts = [layer in sparse and (layer + 1) % interval == 0 for layer in range(num_layers)]
    return _read("Ernie4_5_MoeForCausalLM", hf, layers={"moe": [moe if each else None for each in has_experts]})


def _read(architecture: str, hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    rope = replace(read_rope(hf, read_rope_settings(hf)), interleaved=True)
    return read_decoder(hf, architecture=architecture, ropes=(rope,), **fields)


FAMILIES = {
    "Ernie4_5ForCausalLM": Family(config_from_hf=_ernie4_5_config, names=LLAMA_NAMES),
    "Ernie4_5_MoeForCausalLM": Family(
        config_from_hf=_ernie4_5_moe_config,
        names=_ERNIE4_5_MOE_NAMES,
        # The layers that predict further tokens.
        leaves_out=("*mtp_*",),
    ),
}
