"""Translate the GGUF metadata of DeepSeek V2 and V3, and of models with their layers, into HF's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.names import has_biases
from jaxllm.loading.gguf.settings.numbers import Numbers

_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers of gating functions."""


def deepseek_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSeek's own keys; `config` holds the common keys.

    Files from before attention over latents have the sizes of a head under the keys of other models.
    """
    rope_dim = numbers.count("rope.dimension_count")
    # Newer files have the size of the cache's entries as key_length.
    key_dim = numbers.count("attention.key_length_mla", config["head_dim"])
    if key_dim <= rope_dim:
        raise ValueError(f"a key has {key_dim} numbers and rope.dimension_count is {rope_dim}, expected less")
    has_biased_choice = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    scores = numbers.whole("expert_gating_func", 0) or (_SIGMOID if has_biased_choice else _SOFTMAX)
    if scores not in (_SOFTMAX, _SIGMOID):
        raise ValueError(f"expert_gating_func is {scores}; only {_SOFTMAX} and {_SIGMOID} are supported")
    num_groups = numbers.count("expert_group_count", 1)
    family: dict[str, Any] = {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": numbers.count("attention.kv_lora_rank"),
        "q_lora_rank": numbers.count("attention.q_lora_rank") if "attention.q_lora_rank" in numbers else None,
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": numbers.count("attention.value_length_mla", numbers.whole("attention.value_length", 0)),
        "attention_bias": has_biases(file.tensors, ("attn_q_a", "attn_kv_a_mqa", "attn_output")),
        "rope_scaling": _rope_scaling(numbers, config),
        "n_routed_experts": numbers.count("expert_count"),
        "num_experts_per_tok": numbers.count("expert_used_count"),
        "n_shared_experts": numbers.count("expert_shared_count"),
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "first_k_dense_replace": numbers.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": numbers.number("expert_weights_scale", 1.0),
        "n_group": num_groups,
        "topk_group": numbers.count("expert_group_used_count", num_groups),
        "norm_topk_prob": numbers.flag("expert_weights_norm", False),
    }
    if scores == _SIGMOID:
        return family
    method = "group_limited_greedy" if num_groups > 1 else "greedy"
    return family | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method}


def _rope_scaling(numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return YaRN's settings. Files hold a tenth of `mscale_all_dim`; `mscale` is the same in all models."""
    scaling, tenth = config["rope_scaling"], numbers.number("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling is None or not tenth:
        return scaling
    mscale = round(10 * tenth, 6)
    return scaling | {"mscale": mscale, "mscale_all_dim": mscale}
