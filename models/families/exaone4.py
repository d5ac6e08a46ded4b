"""EXAONE 4: norms after attention and MLP instead of before, norms of q and k, and RoPE in windows alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_int, read_optional_int
from ..names import TensorName
from ..reading import every_nth_global, read_decoder, read_layer_types, read_num_layers, windows_of
from .llama import LLAMA_NAMES

_EXAONE4_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.post_attn_norm.scale": TensorName("{body}layers.{l}.post_attention_layernorm.weight", "d -> d"),
        "layers.post_mlp_norm.scale": TensorName("{body}layers.{l}.post_feedforward_layernorm.weight", "d -> d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def _exaone4_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an EXAONE 4 config.json: every fourth layer is global and knows no positions; without windows all do."""
    hf = DEFAULTS | dict(hf)
    num_layers, window = read_num_layers(hf), read_optional_int(hf, "sliding_window")
    kinds = ("full_attention",) * num_layers
    if window is not None and hf.get("layer_types") is None:
        kinds = every_nth_global(num_layers, read_int(hf, "sliding_window_pattern"))
    kinds = read_layer_types(hf, kinds)
    return read_decoder(
        hf,
        architecture="Exaone4ForCausalLM",
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
        layers={
            "window": windows_of(kinds, window),
            "rope": [0 if window is None or kind == "sliding_attention" else None for kind in kinds],
        },
    )


FAMILIES = {"Exaone4ForCausalLM": Family(config_from_hf=_exaone4_config, names=_EXAONE4_NAMES)}
