"""Translate GGUF metadata about experts into the HF keys of each family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.names import ATTENTION, MLP, has_biases
from jaxllm.loading.gguf.settings.dense import granite_factors
from jaxllm.loading.gguf.settings.numbers import Numbers

_SIGMOID = 2
"""llama.cpp's number of the gating function sigmoid."""


def expert_config(file: GGUFFile, arch: str, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's keys about experts besides the common ones; {} for an architecture without experts."""
    if arch == "llama" and "expert_count" in numbers:
        window = numbers.count("attention.sliding_window") if "attention.sliding_window" in numbers else None
        return _counts(numbers, "num_local_experts") | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window,
        }
    match arch:
        case "qwen2moe":
            return _qwen_config(file, numbers, config) | {
                "norm_topk_prob": False,
                "qkv_bias": has_biases(file.tensors, ATTENTION),
                "shared_expert_intermediate_size": numbers.count("expert_shared_feed_forward_length"),
            }
        case "qwen3moe" | "qwen3vlmoe":
            bias = has_biases(file.tensors, ATTENTION)
            return _qwen_config(file, numbers, config) | {"norm_topk_prob": True, "attention_bias": bias}
        case "glm4moe":
            return _glm_config(file, numbers, config)
        case "olmoe":
            return _counts(numbers, "num_experts") | {"norm_topk_prob": False}
        case "gpt-oss":
            return _gpt_oss_config(file, numbers, config)
        case "llama4":
            return _llama4_config(file, numbers, config)
        case "minimax-m2":
            _check_scores(numbers, config)
            return _counts(numbers, "num_local_experts") | {
                "intermediate_size": numbers.count("expert_feed_forward_length"),
                "partial_rotary_factor": numbers.count("rope.dimension_count", config["head_dim"]) / config["head_dim"],
            }
        case "granitemoe":
            shared = numbers.whole("expert_shared_feed_forward_length", 0)
            family = {"shared_intermediate_size": shared, "attention_bias": has_biases(file.tensors, ATTENTION)}
            return _counts(numbers, "num_local_experts") | granite_factors(numbers) | family
        case "hunyuan-moe":
            width = numbers.count("expert_feed_forward_length")
            return {
                "attention_bias": has_biases(file.tensors, ATTENTION),
                "intermediate_size": width,
                "num_experts": numbers.count("expert_count"),
                "moe_topk": numbers.count("expert_used_count"),
                "moe_intermediate_size": width,
                "num_shared_expert": numbers.count("expert_shared_count", 1),
            }
        case "ernie4_5-moe":
            return _ernie_config(file, numbers)
        case _:
            return {}


def _counts(numbers: Numbers, key: str) -> dict[str, Any]:
    return {key: numbers.count("expert_count"), "num_experts_per_tok": numbers.count("expert_used_count")}


def _ernie_config(file: GGUFFile, numbers: Numbers) -> dict[str, Any]:
    return {
        "use_bias": has_biases(file.tensors, (*ATTENTION, *MLP)),
        "moe_num_experts": numbers.count("expert_count"),
        "moe_k": numbers.count("expert_used_count"),
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "moe_num_shared_experts": numbers.whole("expert_shared_count", 0),
        "moe_layer_start_index": numbers.whole("leading_dense_block_count", 0),
        "moe_layer_interval": numbers.count("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
    }


def _qwen_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return _counts(numbers, "num_experts") | {
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in file.tensors],
    }


def _check_scores(numbers: Numbers, config: Mapping[str, Any]) -> None:
    scores = numbers.whole("expert_gating_func", _SIGMOID)
    if scores != _SIGMOID:
        raise ValueError(f"expert_gating_func is {scores}; of {config['model_type']} only {_SIGMOID} is supported")


def _glm_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_scores(numbers, config)
    return _counts(numbers, "n_routed_experts") | {
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "n_shared_experts": numbers.count("expert_shared_count", 1),
        "first_k_dense_replace": numbers.whole("leading_dense_block_count", 0),
        "n_group": numbers.count("expert_group_count", 1),
        "topk_group": numbers.count("expert_group_used_count", 1),
        "norm_topk_prob": numbers.flag("expert_weights_norm", True),
        "routed_scaling_factor": numbers.number("expert_weights_scale", 1.0),
        "partial_rotary_factor": numbers.count("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "attention_bias": has_biases(file.tensors, ATTENTION),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_scaling"] or {"rope_type": "default"}
    if rope["rope_type"] == "yarn":
        # The file lacks this setting, but no gpt-oss model truncates.
        rope = rope | {"truncate": False}
    return _counts(numbers, "num_local_experts") | {
        "intermediate_size": numbers.count("expert_feed_forward_length"),
        "attention_bias": has_biases(file.tensors, ATTENTION),
        "sliding_window": numbers.count("attention.sliding_window"),
        "rope_scaling": rope,
    }


def _llama4_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Llama 4's own keys.

    The file lacks settings that Scout and Maverick share: chunks, the layers without RoPE, and the growth of queries.
    """
    if numbers.whole("attention.sliding_window", 1) == 0:
        raise ValueError("llama4.attention.sliding_window is 0; models that attend globally alone are not supported")
    counts = _counts(numbers, "num_local_experts")
    return counts | {
        "intermediate_size": numbers.count("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": numbers.count("interleave_moe_layer_step", 1),
        "attention_bias": has_biases(file.tensors, ATTENTION),
        # Only Maverick has this number of experts, and it has no such norm.
        "use_qk_norm": counts["num_local_experts"] != 128,
    }
