"""Mistral: Llama with a sliding window over all layers. Ministral 3: queries also grow with their positions.

Both are also read as the text part of the multimodal `mistral3` wrapper, whose vision tower is Pixtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, QueryScaling
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_mapping, read_optional_float, read_optional_int, require
from ..names import Prefixes, TensorName
from ..reading import (
    is_tied_wrapper,
    read_decoder,
    read_num_layers,
    read_rope_settings,
    read_text_config,
    read_trained_positions,
)
from ..towers.clip import TWO_MATMULS
from ..towers.frame import TowerFrame
from ..towers.reading import read_act, read_axial_theta, read_square, read_text_size, read_tower, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector, TowerSettings
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
_MINISTRAL3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mistral_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mistral config.json."""
    return _read("MistralForCausalLM", hf)


def _mistral3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a `mistral3` config.json, which is a Mistral or a Ministral 3."""
    is_ministral3 = read_mapping(hf, "text_config").get("model_type") == "ministral3"
    text = read_text_config(hf, "ministral3" if is_ministral3 else "mistral")
    read = _read_ministral3 if is_ministral3 else _read
    return read("Mistral3ForConditionalGeneration", text, tie_word_embeddings=is_tied_wrapper(hf, text))


def _ministral3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Ministral 3 config.json."""
    return _read_ministral3("Ministral3ForCausalLM", hf)


def _read(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    windows = (read_optional_int(hf, "sliding_window"),) * read_num_layers(hf)
    return read_decoder(hf, architecture=architecture, layers={"window": windows}, **overrides)


def _read_ministral3(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = _MINISTRAL3_DEFAULTS | {"sliding_window": None} | dict(hf)
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = _MINISTRAL3_ROPE
    settings = read_rope_settings(hf)
    if (beta := read_optional_float(settings, "llama_4_scaling_beta")) is not None:
        trained = read_trained_positions(hf, settings, read_int(hf, "max_position_embeddings"))
        overrides["query_scaling"] = QueryScaling(beta, trained)
    return _read(architecture, hf, **overrides)


# HF's values for keys that a vision_config leaves out.
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_PIXTRAL_EPS = 1e-5


def _mistral3_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a `mistral3` config.json."""
    vision = read_vision(hf, _PIXTRAL, "pixtral")
    require(hf, vision_feature_layer=-1)
    size, patch, out = read_int(vision, "hidden_size"), read_square(vision, "patch_size"), read_text_size(hf)
    bias, eps = read_bool(hf, "multimodal_projector_bias"), read_float(read_mapping(hf, "text_config"), "rms_norm_eps")
    dense = DenseSettings(size, False), DenseSettings(out, bias, read_act(hf)), DenseSettings(out, bias)
    tower = TowerSettings(
        patch_shape=(read_int(vision, "num_channels", 3), patch, patch),
        projector=Projector(norm=NormSettings("rms", eps), join="channels", dense=dense),
        merge=read_int(hf, "spatial_merge_size", 2),
        start_norm=NormSettings("rms", _PIXTRAL_EPS),
        rope_alternates=True,
    )
    return read_tower(vision, "PixtralVision", tower, theta=read_axial_theta(vision), norm_eps=_PIXTRAL_EPS)


_PIXTRAL_LAYER = "{body}transformer.layers.{l}."
_PIXTRAL_NAMES = {
    "patch": TensorName("{body}patch_conv.weight", "d c y x -> d c y x"),
    "start_norm.scale": TensorName("{body}ln_pre.weight", "d -> d"),
    "layers.attn_norm.scale": TensorName(f"{_PIXTRAL_LAYER}attention_norm.weight", "d -> d"),
    "layers.attn.q": TensorName(f"{_PIXTRAL_LAYER}attention.q_proj.weight", "(n h) d -> n h d"),
    "layers.attn.k": TensorName(f"{_PIXTRAL_LAYER}attention.k_proj.weight", "(k h) d -> k h d"),
    "layers.attn.v": TensorName(f"{_PIXTRAL_LAYER}attention.v_proj.weight", "(k h) d -> k h d"),
    "layers.attn.o": TensorName(f"{_PIXTRAL_LAYER}attention.o_proj.weight", "d c -> d c"),
    "layers.mlp_norm.scale": TensorName(f"{_PIXTRAL_LAYER}ffn_norm.weight", "d -> d"),
    "layers.mlp.gate": TensorName(f"{_PIXTRAL_LAYER}feed_forward.gate_proj.weight", "f d -> f d"),
    "layers.mlp.up": TensorName(f"{_PIXTRAL_LAYER}feed_forward.up_proj.weight", "f d -> f d"),
    "layers.mlp.down": TensorName(f"{_PIXTRAL_LAYER}feed_forward.down_proj.weight", "d f -> d f"),
    "projector.norm.scale": TensorName("{head}norm.weight", "d -> d"),
    "projector.dense0.weight": TensorName("{head}patch_merger.merging_layer.weight", "o i -> o i"),
    "projector.dense1.weight": TWO_MATMULS["projector.dense0.weight"],
    "projector.dense1.bias": TWO_MATMULS["projector.dense0.bias"],
    "projector.dense2.weight": TWO_MATMULS["projector.dense1.weight"],
    "projector.dense2.bias": TWO_MATMULS["projector.dense1.bias"],
}
PIXTRAL_TOWER = Family(
    config_from_hf=_mistral3_vision_config,
    names=MappingProxyType(_PIXTRAL_NAMES),
    frame=TowerFrame,
    prefixes=tuple(Prefixes(f"{model}vision_tower.", f"{model}multi_modal_projector.") for model in ("", "model.")),
    marks=("patch",),
)
FAMILIES = {
    "MistralForCausalLM": Family(config_from_hf=_mistral_config, names=LLAMA_NAMES),
    "Mistral3ForConditionalGeneration": Family(
        config_from_hf=_mistral3_config,
        names=LLAMA_NAMES,
        is_wrapper=True,
        vision=PIXTRAL_TOWER,
    ),
    "Ministral3ForCausalLM": Family(config_from_hf=_ministral3_config, names=LLAMA_NAMES),
}
