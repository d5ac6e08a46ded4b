"""Gemma 1: Llama with scaled embeddings, norms that add 1 to their scales, and a GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_int
from ..reading import read_decoder
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def _gemma_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Gemma config.json, where `gelu` has always meant the approximation by tanh."""
    hf = DEFAULTS | dict(hf)
    if hf["hidden_act"] == "gelu":
        hf["hidden_act"] = "gelu_pytorch_tanh"
    bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture="GemmaForCausalLM",
        norm_offset=1.0,
        embed_scale=read_int(hf, "hidden_size") ** 0.5,
        qkv_bias=bias,
        o_bias=bias,
    )


FAMILIES = {"GemmaForCausalLM": Family(config_from_hf=_gemma_config, names=LLAMA_NAMES)}
