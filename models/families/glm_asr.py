"""GLM-ASR: Llama in a wrapper, with an encoder like Whisper's that has RoPE; four of its frames become a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..fields import read_int, require
from ..names import TensorName, plain_mlp_names
from ..reading import read_rope, read_rope_settings
from ..towers.clip import TWO_MATMULS
from ..towers.reading import read_act, read_text_size, read_tower
from ..towers.settings import DenseSettings, Projector, SoundSettings, TowerSettings
from .llama import DEFAULTS, LLAMA, LLAMA_NAMES
from .qwen2_audio import ENCODER_DEFAULTS, NORM, hearing_family, read_audio
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
_NAMES = MappingProxyType(
    {
        **{path: name for path, name in LLAMA_NAMES.items() if path.startswith("layers.") and "mlp." not in path},
        **{path: name for path, name in ENCODER_NAMES.items() if path.startswith("conv")},
        **TWO_MATMULS,
        "layers.attn_norm.bias": TensorName(f"{_LAYER}input_layernorm.bias", "d -> d"),
        "layers.mlp_norm.bias": TensorName(f"{_LAYER}post_attention_layernorm.bias", "d -> d"),
        **plain_mlp_names(f"{_LAYER}mlp.fc1", f"{_LAYER}mlp.fc2"),
        "projector.norm.scale": TensorName("{body}norm.weight", "d -> d"),
        "projector.norm.bias": TensorName("{body}norm.bias", "d -> d"),
    }
)
FAMILIES = hearing_family(
    "GlmAsrForConditionalGeneration", LLAMA, _TEXT_DEFAULTS, (_encoder_config, _NAMES), is_tied=True
)
