"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool
from ..reading import read_decoder
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288, "attention_bias": True}


def _seed_oss_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Seed-OSS config.json."""
    hf = DEFAULTS | dict(hf)
    return read_decoder(
        hf,
        architecture="SeedOssForCausalLM",
        qkv_bias=read_bool(hf, "attention_bias"),
        o_bias=read_bool(hf, "attention_out_bias"),
        mlp_bias=read_bool(hf, "mlp_bias"),
    )


FAMILIES = {"SeedOssForCausalLM": Family(config_from_hf=_seed_oss_config, names=LLAMA_NAMES)}
