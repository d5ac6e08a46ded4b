"""Ultravox: Llama in a wrapper, with Whisper's encoder as its tower; eight of its frames become a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import HIDDEN_ACTS, ModelConfig
from ..fields import read_bool, read_choice, read_int, require
from ..names import TensorName
from ..towers.reading import AUDIO, read_text_size
from ..towers.settings import DenseSettings, NormSettings, Projector
from .llama import DEFAULTS, LLAMA
from .qwen2_audio import NORM, encoder_names, hearing_family, read_encoder

_ARCHITECTURE = "UltravoxModel"
_RMS = NormSettings("rms", 1e-6)


def _encoder_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the encoder and the projector of an Ultravox config.json."""
    require(hf, audio_latency_block_size=None, num_projector_layers=0)
    inner, act = read_int(hf, "hidden_size", 4096), read_choice(hf, "projector_act", ("swiglu", *HIDDEN_ACTS), "swiglu")
    gated, ends_in_norm = act == "swiglu", not read_bool(hf, "projector_ln_mid")
    if gated and inner % 2:
        raise ValueError(f"hidden_size is {inner}, which swiglu cannot halve")
    projector = Projector(
        norm=NORM,
        joined_norm=_RMS,
        dense=(
            DenseSettings(inner, False, "silu" if gated else act, gated, None if ends_in_norm else _RMS),
            DenseSettings(read_text_size(hf), bias=False, norm=_RMS if ends_in_norm else None),
        ),
    )
    group = read_int(hf, "stack_factor", 8)
    return read_encoder(hf, "whisper", "UltravoxEncoder", projector, group=group, ends_in_zeros=True)


_NAMES = encoder_names(
    "projector.norm",
    {
        "projector.joined_norm.scale": TensorName("{head}ln_pre.weight", "d -> d"),
        "projector.dense0.weight": TensorName("{head}linear_1.weight", "o i -> o i"),
        "projector.dense0.norm.scale": TensorName("{head}ln_mid.weight", "d -> d"),
        "projector.dense1.weight": TensorName("{head}linear_2.weight", "o i -> o i"),
        "projector.dense1.norm.scale": TensorName("{head}ln_post.weight", "d -> d"),
    },
)
_FAMILY = hearing_family(_ARCHITECTURE, LLAMA, DEFAULTS, (_encoder_config, _NAMES))[_ARCHITECTURE]


def _ultravox_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of an Ultravox config.json, which is a Llama, and has to be there with the encoder."""
    for key, section in (("text_model_id", "text_config"), ("audio_model_id", AUDIO)):
        if hf.get(key) and not hf.get(section):
            raise ValueError(
                f"{key} is {hf[key]!r}, another repository that has to be in this one: save both with one config.json, "
                f"which has {section} instead of {key} (docs/sounds.md shows how)"
            )
    return _FAMILY.config_from_hf(hf)


FAMILIES = {_ARCHITECTURE: replace(_FAMILY, config_from_hf=_ultravox_config)}
