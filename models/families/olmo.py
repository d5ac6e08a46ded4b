"""OLMo 2 and 3: norms after attention and MLP instead of before, and norms of q and k over all heads together.

OLMoE has experts, and norms before attention and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_int, read_optional_float, read_optional_int
from ..names import TensorName
from ..reading import (
    every_nth_global,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_ropes_by_type,
    windows_of,
)
from .llama import LLAMA_NAMES
from .qwen_moe import MOE_NAMES

_QK_NORMS = {
    "layers.attn.q_norm.scale": TensorName("{body}layers.{l}.self_attn.q_norm.weight", "(n h) -> n h"),
    "layers.attn.k_norm.scale": TensorName("{body}layers.{l}.self_attn.k_norm.weight", "(k h) -> k h"),
}
_OLMO_NAMES = MappingProxyType(
    {
        **{name: tensor for name, tensor in LLAMA_NAMES.items() if not name.startswith("layers.mlp_norm")},
        **_QK_NORMS,
        "layers.post_attn_norm.scale": TensorName("{body}layers.{l}.post_attention_layernorm.weight", "d -> d"),
        "layers.post_mlp_norm.scale": TensorName("{body}layers.{l}.post_feedforward_layernorm.weight", "d -> d"),
    }
)

_OLMOE_NAMES = MappingProxyType({**MOE_NAMES, **_QK_NORMS})

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"vocab_size": 50_304, "rms_norm_eps": 1e-5}
_OLMO3_DEFAULTS = DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0}
_OLMOE_DEFAULTS = DEFAULTS | {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8}


def _olmo2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an OLMo 2 config.json."""
    return _read("Olmo2ForCausalLM", DEFAULTS | dict(hf))


def _olmo3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an OLMo 3 config.json: three layers of four have a sliding window, and plain RoPE."""
    hf = _OLMO3_DEFAULTS | dict(hf)
    layer_types = read_layer_types(hf, every_nth_global(read_num_layers(hf), 4))
    ropes, rope_of = read_ropes_by_type(hf, layer_types, hf["rope_theta"], hf["rope_theta"])
    windows = windows_of(layer_types, read_optional_int(hf, "sliding_window"))
    return _read("Olmo3ForCausalLM", hf, ropes=ropes, layers={"window": windows, "rope": rope_of})


def _olmoe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an OLMoE config.json."""
    hf = _OLMOE_DEFAULTS | dict(hf)
    moe = MoESpec(
        num_experts=read_int(hf, "num_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "intermediate_size"),
        normalizes=read_bool(hf, "norm_topk_prob"),
    )
    limit = read_optional_float(hf, "clip_qkv")
    return _read("OlmoeForCausalLM", hf, moe=moe, pre_norms=True, post_norms=False, qkv_limit=limit)


def _read(architecture: str, hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    bias = read_bool(hf, "attention_bias")
    norms: dict[str, Any] = {"qk_norm": True, "qk_norm_all_heads": True, "pre_norms": False, "post_norms": True}
    return read_decoder(hf, architecture=architecture, qkv_bias=bias, o_bias=bias, **norms | fields)


FAMILIES = {
    "Olmo2ForCausalLM": Family(config_from_hf=_olmo2_config, names=_OLMO_NAMES),
    "Olmo3ForCausalLM": Family(config_from_hf=_olmo3_config, names=_OLMO_NAMES),
    "OlmoeForCausalLM": Family(config_from_hf=_olmoe_config, names=_OLMOE_NAMES),
}
