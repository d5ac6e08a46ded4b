"""Bamba: Llama with layers of Mamba-2, and a few of attention that rotates half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_ints, require
from ..reading import read_decoder, read_num_layers
from .llama import LLAMA_NAMES
from .mamba import in_feed_forward, read_scan, scan_names

_BAMBA_NAMES = MappingProxyType(in_feed_forward({**LLAMA_NAMES, **scan_names("{body}layers.{l}.mamba.")}))

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


def _bamba_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Bamba config.json."""
    # HF rotates half of each head in all configs.
    hf = DEFAULTS | dict(hf) | {"partial_rotary_factor": 0.5}
    require(hf, hidden_act="silu")
    attends = read_ints(hf, "attn_layer_indices")
    has_state = [layer not in attends for layer in range(read_num_layers(hf))]
    scan, bias = read_scan(hf), read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture="BambaForCausalLM",
        rotates_part=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias"),
        layers={
            "state": [scan if each else None for each in has_state],
            "rope": [None if each else 0 for each in has_state],
        },
    )


FAMILIES = {"BambaForCausalLM": Family(config_from_hf=_bamba_config, names=_BAMBA_NAMES)}
