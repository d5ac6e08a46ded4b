"""Llama 4: layers that attend within chunks around global ones without RoPE, and one expert for a token.

It is also read as the text part of the multimodal `llama4` wrapper, which has a vision tower of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec, QueryScaling, RopeConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_ints, require
from ..layers import GPTLayer
from ..names import Fused, Prefixes, TensorName, plain_mlp_names
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
from ..towers.frame import TowerFrame
from ..towers.reading import read_axial_theta, read_side, read_square, read_text_size, read_tower, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector, TowerSettings
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


# HF's values for keys that a vision_config leaves out.
_VISION: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "vision_output_dim": 7680,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
# HF's tower has these whatever its config says.
_EPS, _ACT = 1e-5, "gelu"


def _llama4_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a multimodal Llama 4 config.json."""
    vision = read_vision(hf, _VISION, "llama4_vision_model")
    require(vision, hidden_act=_ACT, vision_feature_select_strategy="default", multi_modal_projector_bias=False)
    patch, side, norm = read_square(vision, "patch_size"), read_side(vision), NormSettings("layer", _EPS)
    inner, theta = DenseSettings(_read_projected(vision), bias=False, act=_ACT), read_axial_theta(vision)
    tower = TowerSettings(
        patch_shape=(read_int(vision, "num_channels", 3), patch, patch),
        projector=Projector(norm=norm, dense=(inner, inner, DenseSettings(read_text_size(hf), bias=False))),
        merge=_read_merge(vision),
        class_position=side**2,
        start_norm=norm,
        positions="exact",
        side=side,
    )
    biases: Any = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    config = read_tower(vision, "Llama4Vision", tower, theta=theta, norm_eps=_EPS, **biases)
    return replace(config, ropes=(RopeConfig(theta=theta, is_split=True, interleaved=True),))


def _read_merge(vision: Mapping[str, Any]) -> int:
    """Return the side of the squares of patches that become a row."""
    ratio = read_float(vision, "pixel_shuffle_ratio")
    if ratio <= 0 or (1 / ratio) % 1:
        raise ValueError(f"pixel_shuffle_ratio is {ratio}, expected one divided by a whole number")
    return int(1 / ratio)


def _read_projected(vision: Mapping[str, Any]) -> int:
    """Return the width of the tower's output, for which the config has three keys."""
    size, merge = read_int(vision, "projector_output_dim"), _read_merge(vision)
    require(vision, projector_input_dim=size, vision_output_dim=size)
    if (width := read_int(vision, "hidden_size") * merge**2) != read_int(vision, "intermediate_size"):
        raise ValueError(f"intermediate_size is {vision['intermediate_size']}; {merge} x {merge} patches have {width}")
    return size


_LAYER, _ADAPTER = "{body}model.layers.{l}.", "{body}vision_adapter.mlp."
_TOWER_NAMES = {
    "patch": TensorName("{body}patch_embedding.linear.weight", "d (c y x) -> d c y x"),
    "positions": TensorName("{body}positional_embedding_vlm", "n d -> n d"),
    "class_token": TensorName("{body}class_embedding", "d -> d"),
    "start_norm.scale": TensorName("{body}layernorm_pre.weight", "d -> d"),
    "start_norm.bias": TensorName("{body}layernorm_pre.bias", "d -> d"),
    "layers.attn_norm.scale": TensorName(f"{_LAYER}input_layernorm.weight", "d -> d"),
    "layers.attn_norm.bias": TensorName(f"{_LAYER}input_layernorm.bias", "d -> d"),
    "layers.attn.q": TensorName(f"{_LAYER}self_attn.q_proj.weight", "(n h) d -> n h d"),
    "layers.attn.k": TensorName(f"{_LAYER}self_attn.k_proj.weight", "(k h) d -> k h d"),
    "layers.attn.v": TensorName(f"{_LAYER}self_attn.v_proj.weight", "(k h) d -> k h d"),
    "layers.attn.o": TensorName(f"{_LAYER}self_attn.o_proj.weight", "d c -> d c"),
    "layers.attn.q_bias": TensorName(f"{_LAYER}self_attn.q_proj.bias", "(n h) -> n h"),
    "layers.attn.k_bias": TensorName(f"{_LAYER}self_attn.k_proj.bias", "(k h) -> k h"),
    "layers.attn.v_bias": TensorName(f"{_LAYER}self_attn.v_proj.bias", "(k h) -> k h"),
    "layers.attn.o_bias": TensorName(f"{_LAYER}self_attn.o_proj.bias", "d -> d"),
    "layers.mlp_norm.scale": TensorName(f"{_LAYER}post_attention_layernorm.weight", "d -> d"),
    "layers.mlp_norm.bias": TensorName(f"{_LAYER}post_attention_layernorm.bias", "d -> d"),
    **plain_mlp_names(f"{_LAYER}mlp.fc1", f"{_LAYER}mlp.fc2"),
    "projector.norm.scale": TensorName("{body}layernorm_post.weight", "d -> d"),
    "projector.norm.bias": TensorName("{body}layernorm_post.bias", "d -> d"),
    "projector.dense0.weight": TensorName(f"{_ADAPTER}fc1.weight", "o i -> o i"),
    "projector.dense1.weight": TensorName(f"{_ADAPTER}fc2.weight", "o i -> o i"),
    "projector.dense2.weight": TensorName("{head}linear_1.weight", "o i -> o i"),
}
LLAMA4_TOWER = Family(
    config_from_hf=_llama4_vision_config,
    names=MappingProxyType(_TOWER_NAMES),
    layer=GPTLayer,
    frame=TowerFrame,
    prefixes=(Prefixes("vision_model.", "multi_modal_projector."),),
    marks=("patch",),
)
FAMILIES = {
    "Llama4ForCausalLM": Family(config_from_hf=_llama4_config, names=_LLAMA4_NAMES, is_text_part=True),
    "Llama4ForConditionalGeneration": Family(
        config_from_hf=_llama4_multimodal_config,
        names=_LLAMA4_NAMES,
        is_wrapper=True,
        vision=LLAMA4_TOWER,
    ),
}
