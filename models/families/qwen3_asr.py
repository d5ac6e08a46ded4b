"""Qwen3-ASR: Qwen3 in a wrapper, with an encoder that hears a second at a time and attends to a few seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import HIDDEN_ACTS, ModelConfig
from ..fields import read_choice, read_int, require
from ..names import TensorName
from ..towers.chunks import ChunkFrame
from ..towers.clip import TWO_MATMULS
from ..towers.reading import read_tower
from ..towers.settings import Chunks, DenseSettings, Projector, SoundSettings, TowerSettings
from .qwen2_audio import NORM, encoder_names, hearing_family, read_audio
from .qwen3 import FAMILIES as QWEN3
from .qwen_vl import with_plain_rope

# HF's values for keys that a config.json leaves out.
_TEXT_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
}
_ENCODER_DEFAULTS = {
    "num_mel_bins": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "hidden_act": "gelu",
    "n_window": 50,
    "n_window_infer": 800,
    "output_dim": 3584,
    "downsample_hidden_size": 480,
}
_CLIP_WINDOWS = 4
"""The windows of attention that are encoded at once: 32 s."""
_QWEN3 = QWEN3["Qwen3ForCausalLM"]


def _text_config(text: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen3-ASR config.json: a Qwen3. All positions of M-RoPE are those of the text."""
    return _QWEN3.config_from_hf(with_plain_rope(text))


def _encoder_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the encoder of a Qwen3-ASR config.json."""
    if hf.get("classify_num") is not None:
        raise ValueError(f"classify_num is {hf['classify_num']!r}: an aligner is not supported, only what writes text")
    audio = {**_ENCODER_DEFAULTS, **read_audio(hf, "qwen3_asr_encoder", "qwen3_asr_audio_encoder")}
    require(audio, scale_embedding=False)
    chunks = Chunks(2 * read_int(audio, "n_window"), read_int(audio, "downsample_hidden_size"))
    windows, rest = divmod(read_int(audio, "n_window_infer"), chunks.num_columns)
    size, num_mels = read_int(audio, "hidden_size"), read_int(audio, "num_mel_bins")
    if rest or not windows:
        raise ValueError(f"n_window_infer is {audio['n_window_infer']}, no multiple of a chunk of {chunks.num_columns}")
    if size < 4 or size % 2 or num_mels % 8:
        raise ValueError(f"d_model is {size} and num_mel_bins is {num_mels}; expected multiples of 2 and of 8")
    window = windows * chunks.num_frames
    act = read_choice(audio, "hidden_act", HIDDEN_ACTS, "gelu")
    tower = TowerSettings(
        patch_shape=(8, num_mels),
        sound=SoundSettings(
            num_frames=_CLIP_WINDOWS * window, group=1, ends_in_zeros=True, chunks=chunks, window=window
        ),
        projector=Projector(
            norm=NORM, dense=(DenseSettings(size, act=act), DenseSettings(read_int(audio, "output_dim")))
        ),
    )
    biases: Any = {"qkv_bias": True, "k_bias": True, "o_bias": True, "mlp_bias": True, "gated": False}
    return read_tower(audio, "Qwen3ASREncoder", tower, norm_eps=NORM.eps, **biases)


_CONVOLUTIONS = {
    f"conv{number}{path}": TensorName(f"{{body}}conv2d{number}.{name}", layout)
    for number in (1, 2, 3)
    for path, name, layout in (("", "weight", "o i m t -> o t m i"), ("_bias", "bias", "o -> o"))
}
_NAMES = {
    path: name._replace(name=name.name.replace("}layer_norm.", "}ln_post."))
    for path, name in encoder_names("projector.norm", TWO_MATMULS).items()
    if path != "positions"
} | {
    **_CONVOLUTIONS,
    "join": TensorName("{body}conv_out.weight", "d (c m) -> d m c"),
    "layers.attn.k_bias": TensorName("{body}layers.{l}.self_attn.k_proj.bias", "(k h) -> k h"),
}
_ON_THE_HUB = {
    f"projector.dense{number}.{name}": TensorName(f"{{head}}proj{number + 1}.{name}", layout)
    for number in (0, 1)
    for name, layout in (("weight", "o i -> o i"), ("bias", "o -> o"))
}
"""The names of the projector in the checkpoints of Qwen's own."""
FAMILIES = hearing_family(
    "Qwen3ASRForConditionalGeneration",
    replace(_QWEN3, config_from_hf=_text_config),
    _TEXT_DEFAULTS,
    (_encoder_config, MappingProxyType(_NAMES)),
    text_types=("qwen3", "qwen3_asr_text"),
    is_tied=True,
    frame=ChunkFrame,
    other_names=(MappingProxyType(_ON_THE_HUB),),
)
