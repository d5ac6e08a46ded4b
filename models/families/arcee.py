"""Arcee: Llama with a squared ReLU and no gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool
from ..reading import read_decoder
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def _arcee_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an Arcee config.json."""
    hf = DEFAULTS | dict(hf)
    attention_bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture="ArceeForCausalLM",
        gated=False,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=read_bool(hf, "mlp_bias"),
    )


FAMILIES = {"ArceeForCausalLM": Family(config_from_hf=_arcee_config, names=LLAMA_NAMES)}
