"""Mistral 4's text model: DeepSeek V3's layers with softmax scores of experts, and queries that grow by position."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, QueryScaling
from ..family import Family
from ..fields import read_int, read_optional_float
from ..reading import read_rope_settings, read_trained_positions
from .deepseek import DEEPSEEK_NAMES, V3_DEFAULTS, read_latent_decoder
from .glm4_moe import read_experts, read_groups, read_normalizer
from .qwen_moe import FUSED_EXPERTS

_MISTRAL4_NAMES = MappingProxyType({**DEEPSEEK_NAMES, **FUSED_EXPERTS})

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = V3_DEFAULTS | {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mistral4_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mistral 4 config.json."""
    hf = DEFAULTS | dict(hf)
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = _ROPE
    settings = read_rope_settings(hf)
    scaling = None
    if (beta := read_optional_float(settings, "llama_4_scaling_beta")) is not None:
        trained = read_trained_positions(hf, settings, read_int(hf, "max_position_embeddings"))
        scaling = QueryScaling(beta, trained)
    moe = read_experts(hf, **read_groups(hf), **read_normalizer(hf))
    return read_latent_decoder(hf, "Mistral4ForCausalLM", moe, query_scaling=scaling)


FAMILIES = {"Mistral4ForCausalLM": Family(config_from_hf=_mistral4_config, names=_MISTRAL4_NAMES)}
