"""GLM-4.7-Flash: layers of DeepSeek V3, with experts in one group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from .deepseek import DEEPSEEK_NAMES, V3_DEFAULTS, read_latent_decoder
from .glm4_moe import read_sigmoid_experts

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = V3_DEFAULTS | {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _glm4_moe_lite_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a GLM-4.7-Flash config.json."""
    hf = DEFAULTS | dict(hf)
    return read_latent_decoder(hf, "Glm4MoeLiteForCausalLM", read_sigmoid_experts(hf))


GLM4_MOE_LITE = Family(
    config_from_hf=_glm4_moe_lite_config,
    names=DEEPSEEK_NAMES,
    # The multi-token-prediction layer, which comes last.
    leaves_out=("model.layers.{after}.*",),
)
FAMILIES = {"Glm4MoeLiteForCausalLM": GLM4_MOE_LITE}
