"""Voxtral: Llama in a wrapper, with Whisper's encoder as its tower; four of its frames become a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..towers.clip import TWO_MATMULS
from ..towers.reading import read_act, read_text_size
from ..towers.settings import DenseSettings, Projector
from .llama import DEFAULTS, LLAMA
from .qwen2_audio import NORM, encoder_names, hearing_family, read_encoder

# HF's values for keys that a config.json leaves out.
_TEXT_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 131_072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000_000.0,
    "head_dim": 128,
}


def _encoder_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the encoder of a Voxtral config.json. It hears whole clips, and their silence gives rows."""
    size, act = read_text_size(hf), read_act(hf)
    dense = DenseSettings(size, bias=False, act=act), DenseSettings(size, bias=False)
    settings: Any = {"group": 4, "hears_silence": True, "gives_silence": True}
    config = read_encoder(hf, "voxtral_encoder", "VoxtralEncoder", Projector(norm=NORM, dense=dense), **settings)
    check_group(config)
    return config


def check_group(config: ModelConfig) -> None:
    """Raise ValueError for an encoder of whose frames not four become a row: these have its MLP's inner width."""
    width, inner = config.hidden_size, config.layers[0].intermediate_size
    if inner != 4 * width:
        raise ValueError(f"audio_config's intermediate_size is {inner}; four frames of {width} have {4 * width}")


FAMILIES = hearing_family(
    "VoxtralForConditionalGeneration",
    LLAMA,
    _TEXT_DEFAULTS,
    (_encoder_config, encoder_names("projector.norm", TWO_MATMULS)),
)
