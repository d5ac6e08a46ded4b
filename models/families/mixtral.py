"""Mixtral: Mistral with experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_int, read_optional_int
from ..names import TensorName
from ..reading import read_decoder
from .llama import LLAMA_NAMES

MIXTRAL_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.mlp.router.weight": TensorName("{body}layers.{l}.block_sparse_moe.gate.weight", "e d -> e d"),
        "layers.mlp.experts.gate": TensorName("{body}layers.{l}.block_sparse_moe.experts.{e}.w1.weight", "f d -> f d"),
        "layers.mlp.experts.up": TensorName("{body}layers.{l}.block_sparse_moe.experts.{e}.w3.weight", "f d -> f d"),
        "layers.mlp.experts.down": TensorName("{body}layers.{l}.block_sparse_moe.experts.{e}.w2.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def _mixtral_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mixtral config.json."""
    hf = DEFAULTS | dict(hf)
    moe = MoESpec(
        num_experts=read_int(hf, "num_local_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "intermediate_size"),
        normalizes=True,
    )
    window = read_optional_int(hf, "sliding_window")
    return read_decoder(hf, architecture="MixtralForCausalLM", window=window, moe=moe)


FAMILIES = {"MixtralForCausalLM": Family(config_from_hf=_mixtral_config, names=MIXTRAL_NAMES)}
