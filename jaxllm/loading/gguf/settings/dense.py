"""Translate the GGUF metadata of families that differ from Llama by a few settings into HF's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.names import ATTENTION, MLP, has_biases
from jaxllm.loading.gguf.settings.numbers import Numbers

_EPSILON = "attention.layer_norm_epsilon"
"""The key of LayerNorms' epsilon; that of RMSNorms has another."""


def dense_config(file: GGUFFile, arch: str, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's keys besides the common ones; {} for an architecture with none or with code of its own."""
    attention_bias, mlp_bias = has_biases(file.tensors, ATTENTION), has_biases(file.tensors, MLP)
    match arch:
        case "seed_oss" | "hunyuan-dense" | "olmoe":
            return {"attention_bias": attention_bias}
        case "gemma":
            return {"hidden_act": "gelu_pytorch_tanh", "attention_bias": attention_bias}
        case "ernie4_5":
            return {"use_bias": attention_bias}
        case "arcee":
            return {"hidden_act": "relu2", "attention_bias": attention_bias, "mlp_bias": mlp_bias}
        case "granite":
            return _granite_config(numbers) | {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
        case "glm4":
            return _glm4_config(numbers, config) | {"attention_bias": attention_bias}
        case "exaone4":
            return _exaone4_config(file, numbers, config)
        case "command-r" | "cohere2":
            return _cohere_config(file, arch, numbers) | {"attention_bias": attention_bias}
        case "starcoder2":
            # A file does not hold the window, which is the same in all sizes.
            act, window = "gelu_pytorch_tanh", 4096
            epsilon = numbers.number(_EPSILON, 1e-5)
            return {"hidden_act": act, "norm_epsilon": epsilon, "use_bias": attention_bias, "sliding_window": window}
        case "phi2":
            return _partial_config(numbers, config) | {"hidden_act": "gelu_new"}
        case "stablelm":
            parallel = numbers.flag("use_parallel_residual", True)
            return _partial_config(numbers, config) | {
                "use_qkv_bias": attention_bias,
                "use_parallel_residual": parallel,
            }
        case _:
            return {}


def _partial_config(numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of models with LayerNorms that rotate a part of a head, whose size the file does not hold."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "head_dim": head_dim,
        "layer_norm_eps": numbers.number(_EPSILON, 1e-5),
        "partial_rotary_factor": numbers.count("rope.dimension_count", head_dim) / max(1, head_dim),
    }


def _glm4_config(numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    if "rope.dimension_sections" in numbers:
        raise ValueError("rope.dimension_sections: the text model of a GLM that sees is not supported")
    return {"partial_rotary_factor": numbers.count("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def _granite_config(numbers: Numbers) -> dict[str, Any]:
    if not numbers.flag("rope.scaling.finetuned", True):
        raise ValueError("rope.scaling.finetuned is false: a Granite without positions is not supported")
    return granite_factors(numbers)


def granite_factors(numbers: Numbers) -> dict[str, Any]:
    """Return the factors on scores, embeddings, what layers add, and logits."""
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: numbers.number(key, 1.0) for ours, key in keys.items()}


def _exaone4_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, key = config["num_hidden_layers"], "exaone4.attention.sliding_window_pattern"
    if "attention.sliding_window" not in numbers:
        return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    slides = [bool((layer + 1) % 4) for layer in range(num_layers)]
    if file.is_array(key):
        slides = [bool(each) for each in file.array(key)]
    return {
        "sliding_window": numbers.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
    }


def _cohere_config(file: GGUFFile, arch: str, numbers: Numbers) -> dict[str, Any]:
    family = {"layer_norm_eps": numbers.number(_EPSILON, 1e-5), "logit_scale": numbers.number("logit_scale", 0.0625)}
    if arch == "cohere2":
        return family | {"sliding_window": numbers.count("attention.sliding_window", 4096)}
    return family | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
