"""GLM-ASR: Llama in a wrapper, with an encoder like Whisper's that has RoPE; four of its frames become a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_int, require
from ..layers import GPTLayer
from ..names import TensorName
from ..reading import is_tied_wrapper, read_rope, read_rope_settings, read_text_config
from ..towers.clip import TWO_MATMULS
from ..towers.frame import SoundFrame
from ..towers.reading import AUDIO, read_act, read_text_size, read_tower
from ..towers.settings import DenseSettings, Projector, SoundSettings, TowerSettings
from .llama import DEFAULTS, LLAMA, LLAMA_NAMES
from .qwen2_audio import AUDIO_PREFIXES, ENCODER_DEFAULTS, NORM, read_audio
from .voxtral import check_group
from .whisper import ENCODER_NAMES

# HF's values for keys that a config.json leaves out.
_TEXT_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 59_264,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
_ENCODER_DEFAULTS = {**ENCODER_DEFAULTS, "max_position_embeddings": 1500, "partial_rotary_factor": 0.5}


def _glm_asr_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a GLM-ASR config.json, which is a Llama."""
    text = {**_TEXT_DEFAULTS, **read_text_config(hf, "llama")}
    tied = is_tied_wrapper({"tie_word_embeddings": True} | dict(hf), text)
    config = LLAMA.config_from_hf(text)
    return replace(config, architecture="GlmAsrForConditionalGeneration", tie_word_embeddings=tied)


def _encoder_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the encoder of a GLM-ASR config.json. It hears whole clips, and their silence gives no rows."""
    audio = {**_ENCODER_DEFAULTS, **read_audio(hf, "glmasr_encoder")}
    require(audio, num_key_value_heads=read_int(audio, "num_attention_heads"))
    size = read_text_size(hf)
    tower = TowerSettings(
        patch_shape=(2, read_int(audio, "num_mel_bins")),
        sound=SoundSettings(num_frames=read_int(audio, "max_position_embeddings"), group=4, hears_silence=True),
        projector=Projector(norm=NORM, dense=(DenseSettings(2 * size, act=read_act(hf)), DenseSettings(size))),
    )
    rope = read_rope(audio, read_rope_settings(audio), rotates_part=True)
    biases: Any = {"qkv_bias": True, "k_bias": False, "o_bias": True, "mlp_bias": True, "gated": False}
    config = read_tower(audio, "GlmAsrEncoder", tower, theta=rope.theta, norm_eps=NORM.eps, **biases)
    check_group(config)
    return replace(config, ropes=(rope,))


_LAYER = "{body}layers.{l}."
GLM_ASR_TOWER = Family(
    config_from_hf=_encoder_config,
    names=MappingProxyType(
        {
            **{path: name for path, name in LLAMA_NAMES.items() if path.startswith("layers.") and "mlp." not in path},
            **{path: name for path, name in ENCODER_NAMES.items() if path.startswith("conv")},
            **TWO_MATMULS,
            "layers.attn_norm.bias": TensorName(f"{_LAYER}input_layernorm.bias", "d -> d"),
            "layers.mlp_norm.bias": TensorName(f"{_LAYER}post_attention_layernorm.bias", "d -> d"),
            "layers.mlp.up": TensorName(f"{_LAYER}mlp.fc1.weight", "f d -> f d"),
            "layers.mlp.up_bias": TensorName(f"{_LAYER}mlp.fc1.bias", "f -> f"),
            "layers.mlp.down": TensorName(f"{_LAYER}mlp.fc2.weight", "d f -> d f"),
            "layers.mlp.down_bias": TensorName(f"{_LAYER}mlp.fc2.bias", "d -> d"),
            "projector.norm.scale": TensorName("{body}norm.weight", "d -> d"),
            "projector.norm.bias": TensorName("{body}norm.bias", "d -> d"),
        }
    ),
    layer=GPTLayer,
    frame=SoundFrame,
    prefixes=AUDIO_PREFIXES,
    marks=("conv1",),
    section=AUDIO,
)
FAMILIES = {
    "GlmAsrForConditionalGeneration": Family(
        config_from_hf=_glm_asr_config, names=LLAMA_NAMES, is_wrapper=True, vision=GLM_ASR_TOWER
    )
}
