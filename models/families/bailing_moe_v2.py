"""Ling 2.0 (BailingMoeV2): norms of q and k, partial RoPE, a dense layer, then experts by sigmoid, in groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..names import Fused, TensorName
from ..reading import read_decoder, read_sparse_layers
from .glm4_moe import GLM4_MOE_NAMES, read_groups, read_normalizer

_ATTENTION = "{body}layers.{l}.attention."
_QKV, _QKV_BIAS = Fused(("q", "k", "v")), Fused(("q_bias", "k_bias", "v_bias"))
_BAILING_NAMES = MappingProxyType(
    {
        **GLM4_MOE_NAMES,
        "embed.table": TensorName("{body}word_embeddings.weight", "v d -> v d"),
        "layers.attn.q": TensorName(_ATTENTION + "query_key_value.weight", "(n h) d -> n h d", _QKV),
        "layers.attn.k": TensorName(_ATTENTION + "query_key_value.weight", "(k h) d -> k h d", _QKV),
        "layers.attn.v": TensorName(_ATTENTION + "query_key_value.weight", "(k h) d -> k h d", _QKV),
        "layers.attn.q_bias": TensorName(_ATTENTION + "query_key_value.bias", "(n h) -> n h", _QKV_BIAS),
        "layers.attn.k_bias": TensorName(_ATTENTION + "query_key_value.bias", "(k h) -> k h", _QKV_BIAS),
        "layers.attn.v_bias": TensorName(_ATTENTION + "query_key_value.bias", "(k h) -> k h", _QKV_BIAS),
        "layers.attn.o": TensorName(_ATTENTION + "dense.weight", "d c -> d c"),
        "layers.attn.q_norm.scale": TensorName(_ATTENTION + "query_layernorm.weight", "h -> h"),
        "layers.attn.k_norm.scale": TensorName(_ATTENTION + "key_layernorm.weight", "h -> h"),
        "layers.mlp.router.correction": TensorName("{body}layers.{l}.mlp.gate.expert_bias", "e -> e"),
    }
)

# The published code's values for keys that a config.json leaves out.
DEFAULTS = {
    "max_position_embeddings": 16_384,
    "partial_rotary_factor": 1.0,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
}


def _bailing_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Ling 2.0 config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, use_qk_norm=True, use_rmsnorm=True, use_bias=False)
    require(hf, score_function="sigmoid", moe_router_enable_expert_bias=True)
    width = read_int(hf, "moe_intermediate_size")
    moe = MoESpec(
        num_experts=read_int(hf, "num_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=width,
        sigmoid=True,
        correction_bias=True,
        **read_groups(hf),
        **read_normalizer(hf),
        routed_scale=read_float(hf, "routed_scaling_factor", 1.0),
        shared_size=read_int(hf, "moe_shared_expert_intermediate_size", width) * read_int(hf, "num_shared_experts"),
    )
    return read_decoder(
        hf,
        architecture="BailingMoeV2ForCausalLM",
        rotates_part=True,
        qkv_bias=read_bool(hf, "use_qkv_bias"),
        qk_norm=True,
        layers={"moe": [moe if sparse else None for sparse in read_sparse_layers(hf)]},
    )


FAMILIES = {
    "BailingMoeV2ForCausalLM": Family(
        config_from_hf=_bailing_config,
        names=_BAILING_NAMES,
        # The multi-token-prediction layer, which comes last.
        leaves_out=("model.layers.{after}.*",),
    )
}
