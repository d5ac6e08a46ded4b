"""GLM-4.5: attention with partial RoPE, a few dense layers, then experts with sigmoid scores and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..names import TensorName
from ..reading import read_decoder, read_num_layers
from .qwen_moe import MOE_NAMES

GLM4_MOE_NAMES = MappingProxyType(
    {
        **MOE_NAMES,
        "layers.mlp.router.correction": TensorName("{body}layers.{l}.mlp.gate.e_score_correction_bias", "e -> e"),
        "layers.mlp.shared.gate": TensorName("{body}layers.{l}.mlp.shared_experts.gate_proj.weight", "f d -> f d"),
        "layers.mlp.shared.up": TensorName("{body}layers.{l}.mlp.shared_experts.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName("{body}layers.{l}.mlp.shared_experts.down_proj.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


def _glm4_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a GLM-4.5 config.json."""
    hf = DEFAULTS | dict(hf)
    moe = read_sigmoid_experts(hf)
    dense = read_int(hf, "first_k_dense_replace", minimum=0)
    return read_decoder(
        hf,
        architecture="Glm4MoeForCausalLM",
        rotates_part=True,
        qkv_bias=read_bool(hf, "attention_bias"),
        qk_norm=read_bool(hf, "use_qk_norm"),
        layers={"moe": [None if layer < dense else moe for layer in range(read_num_layers(hf))]},
    )


def read_experts(hf: Mapping[str, Any], **fields: Any) -> MoESpec:
    """Return the experts of a layer. Shared experts are one expert with the sum of their widths."""
    width = read_int(hf, "moe_intermediate_size")
    return MoESpec(
        num_experts=read_int(hf, "n_routed_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=width,
        routed_scale=read_float(hf, "routed_scaling_factor", 1.0),
        shared_size=width * read_int(hf, "n_shared_experts"),
        **fields,
    )


def read_sigmoid_experts(hf: Mapping[str, Any]) -> MoESpec:
    """Return experts like V3's, which are chosen by the sigmoids of their scores and a learned bias."""
    require(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    return read_experts(hf, sigmoid=True, correction_bias=True, **read_groups(hf), **read_normalizer(hf))


def read_groups(hf: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of groups of experts, and the number of groups that a token may choose from."""
    return {"num_groups": read_int(hf, "n_group", 1), "top_groups": read_int(hf, "topk_group", 1)}


def read_normalizer(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that normalize the weights of a token's experts."""
    return {"normalizes": read_bool(hf, "norm_topk_prob"), "normalizer_eps": 1e-20}


GLM4_MOE = Family(
    config_from_hf=_glm4_moe_config,
    names=GLM4_MOE_NAMES,
    # The multi-token-prediction layer, which comes last.
    leaves_out=("model.layers.{after}.*",),
)
FAMILIES = {"Glm4MoeForCausalLM": GLM4_MOE}
