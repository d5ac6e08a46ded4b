"""Qwen2-Audio: Qwen2 in a wrapper, with Whisper's encoder as its tower, whose frames are averaged in pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flax import nnx

from ..config import ModelConfig
from ..family import Family
from ..fields import read_int, read_mapping, require
from ..layers import GPTLayer
from ..names import Prefixes, TensorName
from ..reading import is_tied_wrapper, read_text_config
from ..towers.frame import SoundFrame
from ..towers.reading import AUDIO, read_text_size, read_tower
from ..towers.settings import DenseSettings, NormSettings, Projector, SoundSettings, TowerSettings
from .qwen2 import DEFAULTS
from .qwen2 import FAMILIES as QWEN2
from .whisper import ENCODER_NAMES

# HF's values for keys that a config.json leaves out.
_TEXT_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
ENCODER_DEFAULTS = {
    "num_mel_bins": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "intermediate_size": 5120,
    "hidden_size": 1280,
    "hidden_act": "gelu",
    "max_source_positions": 1500,
}
_WHISPERS_KEYS = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
}
NORM = NormSettings("layer", 1e-5)
"""The norm after the encoder's last layer."""


def _encoder_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the encoder of a Qwen2-Audio config.json."""
    projector = Projector(join="mean", joined_norm=NORM, dense=(DenseSettings(read_text_size(hf)),))
    return read_encoder(hf, "qwen2_audio_encoder", "Qwen2AudioEncoder", projector, group=2)


def read_encoder(
    hf: Mapping[str, Any], model_type: str, architecture: str, projector: Projector, **sound: Any
) -> ModelConfig:
    """Read an encoder with Whisper's layers from a wrapper's `audio_config`; `sound` has fields of `SoundSettings`."""
    audio = {**ENCODER_DEFAULTS, **read_audio(hf, model_type)}
    require(audio, scale_embedding=False)
    tower = TowerSettings(
        patch_shape=(2, read_int(audio, "num_mel_bins")),
        positions="line",
        sound=SoundSettings(num_frames=read_int(audio, "max_source_positions"), **sound),
        projector=projector,
    )
    biases: Any = {"qkv_bias": True, "k_bias": False, "o_bias": True, "mlp_bias": True, "gated": False}
    return read_tower(audio, architecture, tower, norm_eps=NORM.eps, **biases)


def read_audio(hf: Mapping[str, Any], *model_types: str) -> dict[str, Any]:
    """Return a wrapper's `audio_config`, which must be of these types, with the keys of other encoders for Whisper's.

    The first type is that of a config without one.
    """
    audio = read_mapping(hf, AUDIO)
    if audio.get("model_type", model_types[0]) not in model_types:
        raise ValueError(f"audio_config's model_type is {audio['model_type']!r}; only {model_types[0]} is supported")
    return {_WHISPERS_KEYS.get(key, key): value for key, value in audio.items() if value is not None}


def encoder_names(norm: str, others: Mapping[str, TensorName]) -> Mapping[str, TensorName]:
    """Return the names of such an encoder, the norm after its layers with the path `norm`, and others."""
    moved = {path.replace("final_norm", norm): name for path, name in ENCODER_NAMES.items()}
    return MappingProxyType({**moved, **others})


_PREFIXES = (
    Prefixes("audio_tower.", "multi_modal_projector."),
    Prefixes("model.audio_tower.", "model.multi_modal_projector."),
    Prefixes("thinker.audio_tower.", "thinker.audio_tower."),
)
"""The prefixes of tower and projector: on the hub, in later versions of HF, and in Qwen3-ASR on the hub."""


def hearing_family(
    architecture: str,
    text: Family,
    text_defaults: Mapping[str, Any],
    tower: tuple[Callable[[Mapping[str, Any]], ModelConfig], Mapping[str, TensorName]],
    *,
    text_types: tuple[str, ...] = ("llama",),
    is_tied: bool = False,
    frame: Callable[..., nnx.Module] = SoundFrame,
    other_names: tuple[Mapping[str, TensorName], ...] = (),
) -> Mapping[str, Family]:
    """Return the entry of `FAMILIES` for a wrapper of a text model and a tower that hears.

    `text_defaults` has values for keys that `text_config` leaves out, and `is_tied` for the wrapper's own
    `tie_word_embeddings`. The tower is the function that reads its config, and its names; it may have `other_names`.
    """

    def read(hf: Mapping[str, Any]) -> ModelConfig:
        of_text = {**text_defaults, **read_text_config(hf, *text_types)}
        tied = is_tied_wrapper({"tie_word_embeddings": is_tied} | dict(hf), of_text)
        return replace(text.config_from_hf(of_text), architecture=architecture, tie_word_embeddings=tied)

    config_from_hf, names = tower
    hears = Family(
        config_from_hf=config_from_hf,
        names=names,
        other_names=other_names,
        layer=GPTLayer,
        frame=frame,
        prefixes=_PREFIXES,
        marks=("conv1",),
        section=AUDIO,
    )
    return {architecture: Family(config_from_hf=read, names=text.names, is_wrapper=True, vision=hears)}


_NAMES = encoder_names(
    "projector.joined_norm",
    {
        "projector.dense0.weight": TensorName("{head}linear.weight", "o i -> o i"),
        "projector.dense0.bias": TensorName("{head}linear.bias", "o -> o"),
    },
)
FAMILIES = hearing_family(
    "Qwen2AudioForConditionalGeneration",
    QWEN2["Qwen2ForCausalLM"],
    _TEXT_DEFAULTS,
    (_encoder_config, _NAMES),
    text_types=("qwen2",),
)
