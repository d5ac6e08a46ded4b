"""SmolLM3: Llama with some layers without RoPE, which may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_optional_int
from ..reading import read_decoder, read_layer_types, read_rotated_layers, windows_of
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 128_256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}


def _smollm3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a SmolLM3 config.json."""
    hf = DEFAULTS | dict(hf)
    bias = read_bool(hf, "attention_bias")
    rotated = read_rotated_layers(hf)
    window = read_optional_int(hf, "sliding_window") if read_bool(hf, "use_sliding_window") else None
    pattern = tuple("full_attention" if window is None or rotates else "sliding_attention" for rotates in rotated)
    layer_types = read_layer_types(hf, pattern)
    if window is None and "sliding_attention" in layer_types:
        raise ValueError("layer_types has sliding_attention, which needs use_sliding_window and sliding_window")
    return read_decoder(
        hf,
        architecture="SmolLM3ForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias"),
        layers={
            "rope": tuple(0 if rotates else None for rotates in rotated),
            "window": windows_of(layer_types, window),
        },
    )


FAMILIES = {"SmolLM3ForCausalLM": Family(config_from_hf=_smollm3_config, names=LLAMA_NAMES)}
