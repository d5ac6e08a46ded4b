"""The vision towers of CLIP and SigLIP: learned positions, LayerNorms and an MLP without a gate.

Families differ in what comes before and after the layers, and in where their checkpoints have the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..fields import read_float, read_int
from ..names import Prefixes, TensorName, plain_mlp_names
from .reading import read_side, read_square, read_tower
from .settings import TowerSettings

_LAYER, _EMBEDDINGS = "{body}encoder.layers.{l}.", "{body}embeddings."
CLIP_NAMES = MappingProxyType(
    {
        "patch": TensorName(f"{_EMBEDDINGS}patch_embedding.weight", "d c y x -> d c y x"),
        "patch_bias": TensorName(f"{_EMBEDDINGS}patch_embedding.bias", "d -> d"),
        "positions": TensorName(f"{_EMBEDDINGS}position_embedding.weight", "n d -> n d"),
        "class_token": TensorName(f"{_EMBEDDINGS}class_embedding", "d -> d"),
        "start_norm.scale": TensorName("{body}pre_layrnorm.weight", "d -> d"),
        "start_norm.bias": TensorName("{body}pre_layrnorm.bias", "d -> d"),
        "layers.attn_norm.scale": TensorName(f"{_LAYER}layer_norm1.weight", "d -> d"),
        "layers.attn_norm.bias": TensorName(f"{_LAYER}layer_norm1.bias", "d -> d"),
        "layers.attn.q": TensorName(f"{_LAYER}self_attn.q_proj.weight", "(n h) d -> n h d"),
        "layers.attn.k": TensorName(f"{_LAYER}self_attn.k_proj.weight", "(k h) d -> k h d"),
        "layers.attn.v": TensorName(f"{_LAYER}self_attn.v_proj.weight", "(k h) d -> k h d"),
        "layers.attn.o": TensorName(f"{_LAYER}self_attn.out_proj.weight", "d c -> d c"),
        "layers.attn.q_bias": TensorName(f"{_LAYER}self_attn.q_proj.bias", "(n h) -> n h"),
        "layers.attn.k_bias": TensorName(f"{_LAYER}self_attn.k_proj.bias", "(k h) -> k h"),
        "layers.attn.v_bias": TensorName(f"{_LAYER}self_attn.v_proj.bias", "(k h) -> k h"),
        "layers.attn.o_bias": TensorName(f"{_LAYER}self_attn.out_proj.bias", "d -> d"),
        "layers.mlp_norm.scale": TensorName(f"{_LAYER}layer_norm2.weight", "d -> d"),
        "layers.mlp_norm.bias": TensorName(f"{_LAYER}layer_norm2.bias", "d -> d"),
        **plain_mlp_names(f"{_LAYER}mlp.fc1", f"{_LAYER}mlp.fc2"),
        # SigLIP's norm after the last layer, which CLIP has only for its class token.
        "projector.norm.scale": TensorName("{body}post_layernorm.weight", "d -> d"),
        "projector.norm.bias": TensorName("{body}post_layernorm.bias", "d -> d"),
    }
)
TWO_MATMULS = MappingProxyType(
    {
        f"projector.dense{number}.{kind}": TensorName(f"{{head}}linear_{number + 1}.{kind}", layout)
        for number in (0, 1)
        for kind, layout in (("weight", "o i -> o i"), ("bias", "o -> o"))
    }
)
"""The names of a projector with two matmuls."""

CLIP_PREFIXES = tuple(
    Prefixes(f"{model}vision_tower.{module}", f"{model}multi_modal_projector.")
    for module in ("vision_model.", "")
    for model in ("", "model.")
)
"""The prefixes of tower and projector: on the hub, and in later versions of HF."""

# HF's values for keys that a vision_config leaves out.
SIGLIP_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
)
CLIP_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {**SIGLIP_DEFAULTS, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
)


def read_clip(vision: Mapping[str, Any], architecture: str, *, skips: int = 0, **settings: Any) -> ModelConfig:
    """Read the fields that all towers of this shape share; `settings` are further ones of `TowerSettings`."""
    patch = read_square(vision, "patch_size")
    tower = TowerSettings(
        patch_shape=(read_int(vision, "num_channels", 3), patch, patch),
        side=read_side(vision),
        **{"positions": "exact", **settings},
    )
    eps = read_float(vision, "layer_norm_eps")
    biases: Any = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    return read_tower(vision, architecture, tower, skips=skips, norm_eps=eps, **biases)
