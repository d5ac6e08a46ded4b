"""Llama 4's text model: layers that attend within chunks around global ones without RoPE, and one expert for a token.

It is also read as the text part of the multimodal `llama4` wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec, QueryScaling
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_ints
from ..names import Fused, TensorName
from ..reading import (
    is_tied_wrapper,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_rope,
    read_rope_settings,
    read_rotated_layers,
    read_text_config,
)
from .llama import LLAMA_NAMES

_GATE_UP = Fused(("gate", "up"), axis=1)
_FEED_FORWARD = "{body}layers.{l}.feed_forward."

# All experts are one tensor, [in, out] each.
_LLAMA4_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.mlp.gate": TensorName(_FEED_FORWARD + "gate_proj.weight", "f d -> f d"),
        "layers.mlp.up": TensorName(_FEED_FORWARD + "up_proj.weight", "f d -> f d"),
        "layers.mlp.down": TensorName(_FEED_FORWARD + "down_proj.weight", "d f -> d f"),
        "layers.mlp.router.weight": TensorName(_FEED_FORWARD + "router.weight", "e d -> e d"),
        "layers.mlp.experts.gate": TensorName(_FEED_FORWARD + "experts.gate_up_proj", "d f -> f d", _GATE_UP),
        "layers.mlp.experts.up": TensorName(_FEED_FORWARD + "experts.gate_up_proj", "d f -> f d", _GATE_UP),
        "layers.mlp.experts.down": TensorName(_FEED_FORWARD + "experts.down_proj", "f d -> d f"),
        "layers.mlp.shared.gate": TensorName(_FEED_FORWARD + "shared_expert.gate_proj.weight", "f d -> f d"),
        "layers.mlp.shared.up": TensorName(_FEED_FORWARD + "shared_expert.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName(_FEED_FORWARD + "shared_expert.down_proj.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


def _llama4_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Llama 4 text model."""
    return _read("Llama4ForCausalLM", hf)


def _llama4_multimodal_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a multimodal Llama 4 config.json."""
    text = read_text_config(hf, "llama4_text")
    return _read("Llama4ForConditionalGeneration", text, tie_word_embeddings=is_tied_wrapper(hf, text))


def _read(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    # The first configs have an empty list in place of null, and a number in place of true.
    if hf.get("no_rope_layers") == []:
        hf["no_rope_layers"] = None
    if type(hf["attn_temperature_tuning"]) is int:
        hf["attn_temperature_tuning"] = hf["attn_temperature_tuning"] != 0
    rotated = read_rotated_layers(hf)
    scaling = None
    if read_bool(hf, "attn_temperature_tuning"):
        scaling = QueryScaling(read_float(hf, "attn_scale"), read_int(hf, "floor_scale"), first=1)
    rope = replace(read_rope(hf, read_rope_settings(hf)), interleaved=True)
    bias, epsilon = read_bool(hf, "attention_bias"), None
    if read_bool(hf, "use_qk_norm"):
        # HF norms after rotation. That removes the table's factor, except from the epsilon.
        epsilon, rope = read_float(hf, "rms_norm_eps") / rope.attention_factor**2, replace(rope, attention_factor=1.0)
    return read_decoder(
        hf,
        architecture=architecture,
        intermediate_size=read_int(hf, "intermediate_size_mlp"),
        ropes=(rope,),
        qkv_bias=bias,
        o_bias=bias,
        layers={
            "rope": tuple(0 if rotates else None for rotates in rotated),
            "qk_unit_norm": tuple(epsilon if rotates else None for rotates in rotated),
            "query_scaling": tuple(None if rotates else scaling for rotates in rotated),
            "attention_chunk": _read_chunks(hf, rotated),
            "moe": _read_experts(hf),
        },
        **overrides,
    )


def _read_chunks(hf: Mapping[str, Any], rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the chunks of each layer, by default of those with RoPE."""
    default = tuple("chunked_attention" if rotates else "full_attention" for rotates in rotated)
    layer_types = read_layer_types(hf, default, ("full_attention", "chunked_attention"))
    return tuple(read_int(hf, "attention_chunk_size") if kind == "chunked_attention" else None for kind in layer_types)


def _read_experts(hf: Mapping[str, Any]) -> tuple[MoESpec | None, ...]:
    """Return the experts of each layer, None where it has an MLP."""
    layers = range(read_num_layers(hf))
    step = 0 if hf.get("moe_layers") is not None else read_int(hf, "interleave_moe_layer_step")
    with_experts = set(layers[step - 1 :: step] if step else read_ints(hf, "moe_layers")) & set(layers)
    if not with_experts:
        return (None,) * len(layers)
    width = read_int(hf, "intermediate_size")
    moe = MoESpec(
        num_experts=read_int(hf, "num_local_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=width,
        sigmoid=True,
        scales_inputs=True,
        shared_size=width,
    )
    return tuple(moe if layer in with_experts else None for layer in layers)


FAMILIES = {
    "Llama4ForCausalLM": Family(config_from_hf=_llama4_config, names=_LLAMA4_NAMES, is_text_part=True),
    "Llama4ForConditionalGeneration": Family(
        config_from_hf=_llama4_multimodal_config,
        names=_LLAMA4_NAMES,
        is_wrapper=True,
    ),
}
