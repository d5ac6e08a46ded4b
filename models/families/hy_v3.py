"""HunYuan 3 (Hy3): norms of q and k, a dense layer, then experts by sigmoid with a correction, and shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..names import TensorName
from ..reading import read_decoder, read_sparse_layers
from .glm4_moe import GLM4_MOE_NAMES

_MLP = "{body}layers.{l}.mlp."
_HY_V3_NAMES = MappingProxyType(
    {
        **GLM4_MOE_NAMES,
        "layers.mlp.router.weight": TensorName(_MLP + "router.gate.weight", "e d -> e d"),
        "layers.mlp.router.correction": TensorName(_MLP + "expert_bias", "e -> e"),
        "layers.mlp.shared.gate": TensorName(_MLP + "shared_mlp.gate_proj.weight", "f d -> f d"),
        "layers.mlp.shared.up": TensorName(_MLP + "shared_mlp.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName(_MLP + "shared_mlp.down_proj.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "first_k_dense_replace": 1,
}


def _hy_v3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hy3 config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True)
    width, bias = read_int(hf, "moe_intermediate_size"), read_bool(hf, "attention_bias")
    moe = MoESpec(
        num_experts=read_int(hf, "num_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=width,
        sigmoid=True,
        correction_bias=True,
        normalizes=True,
        normalizer_eps=1e-20,
        routed_scale=read_float(hf, "router_scaling_factor"),
        shared_size=width * read_int(hf, "num_shared_experts"),
    )
    return read_decoder(
        hf,
        architecture="HYV3ForCausalLM",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias"),
        layers={"moe": [moe if sparse else None for sparse in read_sparse_layers(hf)]},
    )


FAMILIES = {
    "HYV3ForCausalLM": Family(
        config_from_hf=_hy_v3_config,
        names=_HY_V3_NAMES,
        # The multi-token-prediction layer, which comes last.
        leaves_out=("model.layers.{after}.*",),
    )
}
