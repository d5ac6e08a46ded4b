"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 in a wrapper.

Their RoPE gives pictures three positions. Those of text are equal, which is plain RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_mapping
from ..reading import is_tied_wrapper, read_decoder, read_rope_settings, read_rope_type, read_text_config
from .llama import LLAMA_NAMES
from .qwen2 import qwen_windows

# HF's values for keys that a config.json leaves out.
_QWEN2_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152_064,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
}
_QWEN3_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}


def _qwen2_vl_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen2-VL config.json."""
    return _read_qwen2("Qwen2VLForConditionalGeneration", hf, "qwen2_vl_text")


def _qwen2_5_vl_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen2.5-VL config.json."""
    return _read_qwen2("Qwen2_5_VLForConditionalGeneration", hf, "qwen2_5_vl_text")


def _qwen3_vl_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen3-VL config.json."""
    text = with_plain_rope(_QWEN3_VL_DEFAULTS | dict(read_text_config(hf, "qwen3_vl_text")))
    bias = read_bool(text, "attention_bias")
    tied = is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), text)
    architecture = "Qwen3VLForConditionalGeneration"
    return read_decoder(
        text, architecture=architecture, qk_norm=True, qkv_bias=bias, o_bias=bias, tie_word_embeddings=tied
    )


def _read_qwen2(architecture: str, hf: Mapping[str, Any], model_type: str) -> ModelConfig:
    # The first checkpoints have the text part's keys among the wrapper's.
    text = read_text_config(hf, model_type) if read_mapping(hf, "text_config") else hf
    text = with_plain_rope(_QWEN2_VL_DEFAULTS | dict(text))
    tied = is_tied_wrapper(hf, text)
    windows = {"window": qwen_windows(text)}
    return read_decoder(text, architecture=architecture, qkv_bias=True, layers=windows, tie_word_embeddings=tied)


def with_plain_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without RoPE's settings for pictures."""
    settings = read_rope_settings(text)
    settings = {name: value for name, value in settings.items() if name not in ("mrope_section", "mrope_interleaved")}
    if read_rope_type(settings) == "mrope":
        settings["rope_type"] = "default"
    return {**text, "rope_parameters": settings, "rope_scaling": None}


FAMILIES = {
    "Qwen2VLForConditionalGeneration": Family(config_from_hf=_qwen2_vl_config, names=LLAMA_NAMES, is_wrapper=True),
    "Qwen2_5_VLForConditionalGeneration": Family(config_from_hf=_qwen2_5_vl_config, names=LLAMA_NAMES, is_wrapper=True),
    "Qwen3VLForConditionalGeneration": Family(config_from_hf=_qwen3_vl_config, names=LLAMA_NAMES, is_wrapper=True),
}
