"""Whisper: an encoder of 30 seconds of sound, and a decoder that attends to its frames."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import HIDDEN_ACTS, LayerSpec, ModelConfig
from ..family import Family
from ..fields import read_choice, read_int, require
from ..layers import CrossDecoderLayer, GPTFrame, GPTLayer
from ..names import Prefixes, TensorName, plain_mlp_names
from ..reading import MAX_LAYERS, read_decoder
from ..towers.settings import ClipSettings
from ..towers.whisper import WhisperFrame
from .opt import own_heads

# HF's values for keys that a config.json leaves out.
_DEFAULTS = {
    "vocab_size": 51_865,
    "num_mel_bins": 80,
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "activation_function": "gelu",
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "tie_word_embeddings": True,
}
_EPS = 1e-5
_BIASES: dict[str, Any] = {"qkv_bias": True, "k_bias": False, "o_bias": True, "mlp_bias": True}


def _whisper_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the decoder of a Whisper config.json."""
    hf = {**_DEFAULTS, **hf}
    require(hf, scale_embedding=False)
    num_layers, hidden_size = read_int(hf, "decoder_layers", maximum=MAX_LAYERS // 2), read_int(hf, "d_model")
    num_tokens, num_frames = read_int(hf, "max_target_positions"), read_int(hf, "max_source_positions")
    if num_tokens > num_frames:
        raise ValueError(f"max_target_positions is {num_tokens}, expected {num_frames} frames of a clip at most")
    decoder = {
        "num_hidden_layers": 2 * num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": read_int(hf, "decoder_attention_heads"),
        "intermediate_size": read_int(hf, "decoder_ffn_dim"),
        "max_position_embeddings": num_tokens,
        **own_heads(hidden_size, read_int(hf, "decoder_attention_heads")),
    }
    parts: dict[str, Any] = {"is_cross": (False, True), "has_mlp": (False, True)}
    return read_decoder(
        {**hf, **decoder},
        architecture="WhisperForConditionalGeneration",
        act_key="activation_function",
        norm_eps=_EPS,
        ropes=(),
        rope=None,
        gated=False,
        layer_parts=2,
        layers={name: values * num_layers for name, values in parts.items()},
        **_BIASES,
    )


def _encoder_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the encoder of a Whisper config.json."""
    hf = {**_DEFAULTS, **hf}
    hidden_size, num_heads = read_int(hf, "d_model"), read_int(hf, "encoder_attention_heads")
    head_dim: Any = own_heads(hidden_size, num_heads)["head_dim"]
    layer = LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=read_int(hf, "encoder_ffn_dim"),
        scale=head_dim**-0.5,
        hidden_act=read_choice(hf, "activation_function", HIDDEN_ACTS, "gelu"),
        causal=False,
        rope=None,
        gated=False,
        **_BIASES,
    )
    return ModelConfig(
        architecture="WhisperEncoder",
        vocab_size=0,
        hidden_size=hidden_size,
        layers=(layer,) * read_int(hf, "encoder_layers", maximum=MAX_LAYERS),
        ropes=(),
        max_position_embeddings=0,
        norm_eps=_EPS,
        tie_word_embeddings=False,
        clips=ClipSettings(read_int(hf, "num_mel_bins"), read_int(hf, "max_source_positions")),
    )


def _attention_names(ours: str, theirs: str, norm: str) -> dict[str, TensorName]:
    """Return the names of an attention's parameters, `ours`, and of the norm before it."""
    layer = "{body}layers.{l}."
    return {
        f"layers.{ours}_norm.scale": TensorName(f"{layer}{norm}.weight", "d -> d"),
        f"layers.{ours}_norm.bias": TensorName(f"{layer}{norm}.bias", "d -> d"),
        f"layers.{ours}.q": TensorName(f"{layer}{theirs}.q_proj.weight", "(n h) d -> n h d"),
        f"layers.{ours}.k": TensorName(f"{layer}{theirs}.k_proj.weight", "(k h) d -> k h d"),
        f"layers.{ours}.v": TensorName(f"{layer}{theirs}.v_proj.weight", "(k h) d -> k h d"),
        f"layers.{ours}.o": TensorName(f"{layer}{theirs}.out_proj.weight", "d c -> d c"),
        f"layers.{ours}.q_bias": TensorName(f"{layer}{theirs}.q_proj.bias", "(n h) -> n h"),
        f"layers.{ours}.v_bias": TensorName(f"{layer}{theirs}.v_proj.bias", "(k h) -> k h"),
        f"layers.{ours}.o_bias": TensorName(f"{layer}{theirs}.out_proj.bias", "d -> d"),
    }


_SHARED_NAMES = {
    **_attention_names("attn", "self_attn", "self_attn_layer_norm"),
    "positions": TensorName("{body}embed_positions.weight", "p d -> p d"),
    "final_norm.scale": TensorName("{body}layer_norm.weight", "d -> d"),
    "final_norm.bias": TensorName("{body}layer_norm.bias", "d -> d"),
    "layers.mlp_norm.scale": TensorName("{body}layers.{l}.final_layer_norm.weight", "d -> d"),
    "layers.mlp_norm.bias": TensorName("{body}layers.{l}.final_layer_norm.bias", "d -> d"),
    **plain_mlp_names("{body}layers.{l}.fc1", "{body}layers.{l}.fc2"),
}
ENCODER_NAMES = MappingProxyType(
    {
        **_SHARED_NAMES,
        "conv1": TensorName("{body}conv1.weight", "d c k -> d k c"),
        "conv1_bias": TensorName("{body}conv1.bias", "d -> d"),
        "conv2": TensorName("{body}conv2.weight", "d c k -> d k c"),
        "conv2_bias": TensorName("{body}conv2.bias", "d -> d"),
    }
)
_ENCODER = Family(
    config_from_hf=_encoder_config,
    names=ENCODER_NAMES,
    layer=GPTLayer,
    frame=WhisperFrame,
    prefixes=(Prefixes("model.encoder.", ""), Prefixes("encoder.", "")),
    marks=("conv1",),
)
FAMILIES = {
    "WhisperForConditionalGeneration": Family(
        config_from_hf=_whisper_config,
        names=MappingProxyType(
            {
                **_SHARED_NAMES,
                **_attention_names("cross", "encoder_attn", "encoder_attn_layer_norm"),
                "embed.table": TensorName("{body}embed_tokens.weight", "v d -> v d"),
                "lm_head.table": TensorName("{head}proj_out.weight", "v d -> v d"),
            }
        ),
        layer=CrossDecoderLayer,
        frame=GPTFrame,
        prefixes=(Prefixes("model.decoder.", ""), Prefixes("decoder.", "")),
        encoder=_ENCODER,
    )
}
