"""Qwen3: Llama with a norm on each head of q and k, and a head size that does not follow from the width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool
from ..reading import read_decoder
from .llama import LLAMA_NAMES
from .qwen2 import DEFAULTS, qwen_windows


def _qwen3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3 config.json."""
    hf = DEFAULTS | {"head_dim": 128} | dict(hf)
    bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        layers={"window": qwen_windows(hf)},
    )


FAMILIES = {"Qwen3ForCausalLM": Family(config_from_hf=_qwen3_config, names=LLAMA_NAMES)}
