"""DeepSeek V2 and V3: attention over latents, a few dense layers, then experts in groups and shared ones.

V3's layers are also those of R1 and Kimi K2, and most of those of GLM-4.7-Flash and Mistral 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec, RopeConfig
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, require
from ..mixer_specs import LatentSpec
from ..names import Fused, TensorName
from ..reading import read_decoder, read_rope, read_rope_settings, read_sparse_layers
from .glm4_moe import GLM4_MOE_NAMES, read_experts, read_groups, read_sigmoid_experts

_ATTENTION = "{body}layers.{l}.self_attn."
_KV_B = Fused(("up_k", "up_v"), by_head=True)

DEEPSEEK_NAMES = MappingProxyType(
    {
        **GLM4_MOE_NAMES,
        "layers.attn.q_a": TensorName(_ATTENTION + "q_a_proj.weight", "q d -> q d"),
        "layers.attn.q_a_bias": TensorName(_ATTENTION + "q_a_proj.bias", "q -> q"),
        "layers.attn.q_a_norm.scale": TensorName(_ATTENTION + "q_a_layernorm.weight", "q -> q"),
        "layers.attn.q_b": TensorName(_ATTENTION + "q_b_proj.weight", "(n h) q -> n h q"),
        "layers.attn.kv_a": TensorName(_ATTENTION + "kv_a_proj_with_mqa.weight", "h d -> h d"),
        "layers.attn.kv_a_bias": TensorName(_ATTENTION + "kv_a_proj_with_mqa.bias", "h -> h"),
        "layers.attn.kv_a_norm.scale": TensorName(_ATTENTION + "kv_a_layernorm.weight", "l -> l"),
        "layers.attn.up_k": TensorName(_ATTENTION + "kv_b_proj.weight", "(n h) l -> n l h", _KV_B),
        "layers.attn.up_v": TensorName(_ATTENTION + "kv_b_proj.weight", "(n h) l -> n h l", _KV_B),
    }
)

# HF's values for keys that a config.json leaves out.
_V2_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
}
V3_DEFAULTS: dict[str, Any] = _V2_DEFAULTS | {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
}


def _deepseek_v2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a DeepSeek-V2 config.json, or that of V2-Lite."""
    hf = _V2_DEFAULTS | dict(hf)
    require(hf, scoring_func="softmax", norm_topk_prob=False)
    method = read_choice(hf, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
    fields: dict[str, Any] = {"group_best": 1} | read_groups(hf) if method == "group_limited_greedy" else {}
    return read_latent_decoder(hf, "DeepseekV2ForCausalLM", read_experts(hf, **fields))


def _deepseek_v3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a DeepSeek-V3 config.json, or one of R1 or Kimi K2."""
    hf = V3_DEFAULTS | dict(hf)
    return read_latent_decoder(hf, "DeepseekV3ForCausalLM", read_sigmoid_experts(hf))


def read_latent_decoder(
    hf: Mapping[str, Any],
    architecture: str,
    moe: MoESpec,
    *,
    layers: Mapping[str, Any] | None = None,
    **fields: Any,
) -> ModelConfig:
    """Read a decoder with attention over latents, and experts `moe` in layers that are not dense.

    `layers` has further fields in which layers differ.
    """
    require(hf, mlp_bias=False, moe_layer_freq=1, num_key_value_heads=read_int(hf, "num_attention_heads"))
    settings = read_rope_settings(hf)
    # The rotated part has its own size, and all of it is rotated.
    is_interleaved = read_bool(hf, "rope_interleave", True)
    rope = replace(read_rope(hf, settings, rotates_part=True), rotated=1.0, interleaved=is_interleaved)
    latent, bias = read_latent(hf), read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture=architecture,
        num_kv_heads=1,
        head_dim=latent.key_dim,
        latent=latent,
        scale=_softmax_scale(latent, rope, settings),
        ropes=(rope,),
        qkv_bias=bias,
        o_bias=bias,
        layers={"moe": [moe if is_sparse else None for is_sparse in read_sparse_layers(hf)], **(layers or {})},
        **fields,
    )


def read_latent(hf: Mapping[str, Any], **fields: Any) -> LatentSpec:
    """Return the sizes of attention over latents, with further fields."""
    return LatentSpec(
        rank=read_int(hf, "kv_lora_rank"),
        q_rank=None if hf["q_lora_rank"] is None else read_int(hf, "q_lora_rank"),
        nope_dim=read_int(hf, "qk_nope_head_dim"),
        rope_dim=read_int(hf, "qk_rope_head_dim"),
        v_dim=read_int(hf, "v_head_dim"),
        **fields,
    )


def _softmax_scale(latent: LatentSpec, rope: RopeConfig, settings: Mapping[str, Any]) -> float:
    """Return the factor on scores; with a scaled RoPE and `mscale_all_dim` it grows with the scaling factor."""
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    weight = settings.get("mscale_all_dim")
    if rope.rope_type == "default" or not weight or rope.factor <= 1:
        return scale
    return scale * (0.1 * read_float(settings, "mscale_all_dim") * math.log(rope.factor) + 1) ** 2


DEEPSEEK_V3 = Family(
    config_from_hf=_deepseek_v3_config,
    names=DEEPSEEK_NAMES,
    # The multi-token-prediction layer, which comes last.
    leaves_out=("model.layers.{after}.*",),
)
FAMILIES = {
    "DeepseekV2ForCausalLM": Family(config_from_hf=_deepseek_v2_config, names=DEEPSEEK_NAMES),
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
}
