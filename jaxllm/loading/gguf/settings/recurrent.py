"""Translate the GGUF metadata of models with recurrent layers into HF's keys.

Files do not hold the kind of each layer: it follows from the layer's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.names import ATTENTION, has_biases
from jaxllm.loading.gguf.settings.dense import granite_factors
from jaxllm.loading.gguf.settings.numbers import Numbers


def recurrent_config(file: GGUFFile, arch: str, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's keys besides the common ones; {} for an architecture without recurrent layers."""
    match arch:
        case "qwen35" | "qwen35moe" | "qwen3next":
            return _delta_config(file, numbers, config)
        case "lfm2" | "lfm2moe":
            return _lfm2_config(file, arch, numbers, config)
        case "granitehybrid":
            return _granite_config(file, numbers, config)
        case "nemotron_h" | "nemotron_h_moe":
            return _nemotron_config(file, numbers, config)
        case _:
            return {}


def _layers_with(file: GGUFFile, stem: str, config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has the matrix `stem`."""
    return [f"blk.{layer}.{stem}.weight" in file.tensors for layer in range(config["num_hidden_layers"])]


def _layer_types(file: GGUFFile, config: Mapping[str, Any], recurrent: str) -> list[str]:
    return ["full_attention" if attends else recurrent for attends in _layers_with(file, "attn_q", config)]


def _delta_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a gated delta net; with experts, each layer has some."""
    num_heads, head_dim = _head_sizes(numbers)
    num_key_heads = numbers.count("ssm.group_count")
    if num_heads % num_key_heads:
        raise ValueError(f"ssm.time_step_rank is {num_heads}, not a multiple of ssm.group_count, {num_key_heads}")
    family: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": _layer_types(file, config, "linear_attention"),
        "partial_rotary_factor": numbers.count("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "linear_conv_kernel_dim": numbers.count("ssm.conv_kernel"),
        "linear_key_head_dim": numbers.count("ssm.state_size"),
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": head_dim,
    }
    if "expert_count" not in numbers:
        return family
    return family | {
        "num_experts": numbers.count("expert_count"),
        "num_experts_per_tok": numbers.count("expert_used_count"),
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": numbers.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


def _lfm2_config(file: GGUFFile, arch: str, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    family: dict[str, Any] = {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": _layer_types(file, config, "conv"),
        "conv_L_cache": numbers.count("shortconv.l_cache"),
        "conv_bias": has_biases(file.tensors, ("in_proj",)),
        "block_auto_adjust_ff_dim": False,
    }
    if arch == "lfm2":
        return family
    return family | {
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "num_dense_layers": numbers.whole("leading_dense_block_count", 0),
        "num_experts": numbers.count("expert_count"),
        "num_experts_per_tok": numbers.count("expert_used_count"),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
        "norm_topk_prob": numbers.flag("expert_weights_norm", True),
        "routed_scaling_factor": numbers.number("expert_weights_scale", 1.0),
    }


def _granite_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, head_dim = _head_sizes(numbers)
    return granite_factors(numbers) | {
        "layer_types": _layer_types(file, config, "linear_attention"),
        "position_embedding_type": "rope" if numbers.flag("rope.scaling.finetuned", True) else "nope",
        "attention_bias": has_biases(file.tensors, ATTENTION),
        "num_local_experts": numbers.whole("expert_count", 0),
        "num_experts_per_tok": max(1, numbers.whole("expert_used_count", 1)),
        "shared_intermediate_size": numbers.count("expert_shared_feed_forward_length", config["intermediate_size"]),
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_expand": num_heads * head_dim // config["hidden_size"],
        "mamba_n_groups": numbers.count("ssm.group_count"),
        "mamba_d_state": numbers.count("ssm.state_size"),
        "mamba_d_conv": numbers.count("ssm.conv_kernel"),
        "mamba_conv_bias": has_biases(file.tensors, ("ssm_conv1d",)),
        "mamba_proj_bias": has_biases(file.tensors, ("ssm_in", "ssm_out")),
    }


def _nemotron_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, head_dim = _head_sizes(numbers)
    attends, chooses, has_mlp = (_layers_with(file, stem, config) for stem in ("attn_q", "ffn_gate_inp", "ffn_up"))
    family: dict[str, Any] = {
        "layers_block_type": [
            "full_attention" if attn else "moe" if moe else "mlp" if mlp else "linear_attention"
            for attn, moe, mlp in zip(attends, chooses, has_mlp, strict=True)
        ],
        "layer_norm_epsilon": numbers.number("attention.layer_norm_rms_epsilon", 1e-5),
        "attention_bias": False,
        "mlp_bias": has_biases(file.tensors, ("ffn_up", "ffn_down")),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "n_groups": numbers.count("ssm.group_count"),
        "ssm_state_size": numbers.count("ssm.state_size"),
        "conv_kernel": numbers.count("ssm.conv_kernel"),
        "use_conv_bias": has_biases(file.tensors, ("ssm_conv1d",)),
        "use_bias": has_biases(file.tensors, ("ssm_in", "ssm_out")),
    }
    if not any(chooses):
        return family
    return family | {
        "n_routed_experts": numbers.count("expert_count"),
        "num_experts_per_tok": numbers.count("expert_used_count"),
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": numbers.count("expert_shared_feed_forward_length"),
        "n_group": numbers.count("expert_group_count", 1),
        "topk_group": numbers.count("expert_group_used_count", 1),
        "norm_topk_prob": numbers.flag("expert_weights_norm", True),
        "routed_scaling_factor": numbers.number("expert_weights_scale", 1.0),
        "moe_latent_size": numbers.whole("moe_latent_size", 0) or None,
    }


def mamba_config(file: GGUFFile, arch: str, numbers: Numbers) -> dict[str, Any]:
    """Return the keys of a model without attention. No length is among them: the converter writes a large number."""
    config: dict[str, Any] = {
        "layer_norm_epsilon": numbers.number("attention.layer_norm_rms_epsilon", 1e-5),
        "state_size": numbers.count("ssm.state_size"),
        "conv_kernel": numbers.count("ssm.conv_kernel"),
        "use_conv_bias": has_biases(file.tensors, ("ssm_conv1d",)),
        "use_bias": has_biases(file.tensors, ("ssm_in", "ssm_out")),
        "intermediate_size": numbers.count("ssm.inner_size"),
    }
    if arch == "mamba2":
        num_heads, head_dim = _head_sizes(numbers)
        expand = config["intermediate_size"] // numbers.count("embedding_length")
        return config | {
            "num_heads": num_heads,
            "head_dim": head_dim,
            "expand": expand,
            "n_groups": numbers.count("ssm.group_count"),
        }
    config["time_step_rank"] = numbers.count("ssm.time_step_rank")
    if numbers.flag("ssm.dt_b_c_rms", False):
        config |= {"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"]}
    return config


def _head_sizes(numbers: Numbers) -> tuple[int, int]:
    """Return the number of heads with states, and the numbers that each puts out."""
    num_heads, size = numbers.count("ssm.time_step_rank"), numbers.count("ssm.inner_size")
    if size % num_heads:
        raise ValueError(f"ssm.inner_size is {size}, not a multiple of ssm.time_step_rank, {num_heads}")
    return num_heads, size // num_heads
