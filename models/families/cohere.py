"""Cohere's Command R, Command R+, Command R7B, Command A and Aya: attention and MLP side by side behind one LayerNorm.

Command R7B and later models have windows with RoPE, and global layers without; the largest have experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, read_optional_int, require
from ..names import TensorName
from ..reading import (
    every_nth_global,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_rope,
    read_rope_settings,
    read_sparse_layers,
    windows_of,
)
from .glm4_moe import GLM4_MOE_NAMES
from .llama import LLAMA_NAMES

_COHERE_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.attn.q_norm.scale": TensorName("{body}layers.{l}.self_attn.q_norm.weight", "n h -> n h"),
        "layers.attn.k_norm.scale": TensorName("{body}layers.{l}.self_attn.k_norm.weight", "k h -> k h"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
_COHERE1_DEFAULTS = {"rope_theta": 500_000.0}
_COHERE2_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4}
_MOE_DEFAULTS = {
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "norm_topk_prob": True,
    "prefix_dense_sliding_window_pattern": 1,
}


def _cohere_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Command R or Command R+; the latter norms each head of q and k by scales of its own."""
    hf = DEFAULTS | _COHERE1_DEFAULTS | dict(hf)
    norms_heads = read_bool(hf, "use_qk_norm")
    return _read("CohereForCausalLM", hf, qk_norm=norms_heads, qk_norm_by_head=norms_heads)


def _cohere2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Command R7B or Command A."""
    hf = DEFAULTS | _COHERE2_DEFAULTS | dict(hf)
    require(hf, use_parallel_block=True, use_gated_activation=True)
    pattern = every_nth_global(read_num_layers(hf), read_int(hf, "sliding_window_pattern"))
    kinds = read_layer_types(hf, pattern)
    window = read_optional_int(hf, "sliding_window")
    rotates = [window is not None and kind == "sliding_attention" for kind in kinds]
    layers = {"window": windows_of(kinds, window), "rope": [0 if each else None for each in rotates]}
    return _read("Cohere2ForCausalLM", hf, layers=layers)


def _cohere2_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Command A+ or North: the first layers may be dense, with a pattern of their own."""
    hf = DEFAULTS | _COHERE2_DEFAULTS | _MOE_DEFAULTS | dict(hf)
    require(hf, use_parallel_block=True, use_gated_activation=True, use_qk_norm=False)
    num_layers, prefix = read_num_layers(hf), read_int(hf, "prefix_dense_sliding_window_pattern")
    num_dense = min(num_layers, read_int(hf, "first_k_dense_replace", 0, minimum=0))
    rest = every_nth_global(num_layers - num_dense, read_int(hf, "sliding_window_pattern"))
    kinds = read_layer_types(hf, every_nth_global(num_dense, prefix) + rest)
    sparse, window = read_sparse_layers(hf), read_optional_int(hf, "sliding_window")
    windows, moe, width = windows_of(kinds, window), _read_moe(hf), read_int(hf, "intermediate_size")
    dense_width = read_int(hf, "prefix_dense_intermediate_size", width)
    rotates = [size is not None or (prefix == 1 and not each) for size, each in zip(windows, sparse, strict=True)]
    norms: dict[str, Any] = {}
    if hf.get("rms_norm_eps") is not None:
        norms = {"layer_norms": False, "norm_eps": read_float(hf, "rms_norm_eps")}
    layers = {
        "window": windows,
        "rope": [0 if each else None for each in rotates],
        "moe": [moe if each else None for each in sparse],
        "intermediate_size": [width if each else dense_width for each in sparse],
    }
    return _read("Cohere2MoeForCausalLM", hf, layers=layers, **norms)


def _read_moe(hf: Mapping[str, Any]) -> MoESpec:
    """Return the experts of a layer. HF takes the softmax over a token's chosen experts alone."""
    sigmoid = read_choice(hf, "expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "sigmoid"
    strategy = read_choice(hf, "shared_expert_combination_strategy", ("average", "sum"), "average")
    num_shared, width = read_int(hf, "num_shared_experts", minimum=0), read_int(hf, "intermediate_size")
    factor = 0.5 if num_shared and strategy == "average" else 1.0
    return MoESpec(
        num_experts=read_int(hf, "num_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=width,
        sigmoid=sigmoid,
        normalizes=not sigmoid or read_bool(hf, "norm_topk_prob"),
        routed_scale=factor,
        shared_size=num_shared * width or None,
        shared_scale=factor,
    )


def _read(architecture: str, hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    bias = read_bool(hf, "attention_bias")
    norms: dict[str, Any] = {"norm_eps": read_float(hf, "layer_norm_eps"), "layer_norms": True, "norm_bias": False}
    return read_decoder(
        hf,
        architecture=architecture,
        ropes=(replace(read_rope(hf, read_rope_settings(hf)), interleaved=True),),
        parallel=True,
        shares_norm=True,
        logits_divisor=1 / read_float(hf, "logit_scale"),
        qkv_bias=bias,
        o_bias=bias,
        **norms | fields,
    )


FAMILIES = {
    "CohereForCausalLM": Family(config_from_hf=_cohere_config, names=_COHERE_NAMES),
    "Cohere2ForCausalLM": Family(config_from_hf=_cohere2_config, names=_COHERE_NAMES),
    "Cohere2MoeForCausalLM": Family(config_from_hf=_cohere2_moe_config, names=GLM4_MOE_NAMES),
}
