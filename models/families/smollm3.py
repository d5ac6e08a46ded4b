"""SmolLM3: Llama with layers that know no positions, which may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_int, read_optional_int
from ..reading import read_decoder, read_layer_types, read_num_layers, windows_of
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 128_256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}


def smollm3_config(hf: Mapping[str, Any]) -> ModelConfig:
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


def read_rotated_layers(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    """Say of each layer whether it rotates queries and keys: `no_rope_layers` has a 1 if so, and a 0 if not."""
    num_layers, given = read_num_layers(hf), hf.get("no_rope_layers")
    if given is None:
        interval = read_int(hf, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(given, list | tuple) or len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise ValueError(f"no_rope_layers is {given!r}, expected {num_layers} numbers, each 0 or 1")
    return tuple(each == 1 for each in given[:num_layers])


SMOLLM3 = Family(config_from_hf=smollm3_config, names=LLAMA_NAMES)
