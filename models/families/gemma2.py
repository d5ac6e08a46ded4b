"""Gemma 2: soft caps, norms before and after attention and MLP, scaled embeddings, windows on every other layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_optional_float, read_optional_int
from ..names import TensorName
from ..reading import read_decoder, read_layer_types, read_num_layers, windows_of
from .llama import LLAMA_NAMES

# Gemma's "post_attention" norm comes after attention; Llama's is the norm before the MLP.
GEMMA_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.post_attn_norm.scale": TensorName("{body}layers.{l}.post_attention_layernorm.weight", "d -> d"),
        "layers.mlp_norm.scale": TensorName("{body}layers.{l}.pre_feedforward_layernorm.weight", "d -> d"),
        "layers.post_mlp_norm.scale": TensorName("{body}layers.{l}.post_feedforward_layernorm.weight", "d -> d"),
    }
)

# HF's values for keys that a config.json leaves out. Gemma's own leave out many.
DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def _gemma2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Gemma 2 config.json."""
    hf = DEFAULTS | dict(hf)
    num_layers = read_num_layers(hf)
    alternating = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers))
    return read_gemma(hf, "Gemma2ForCausalLM", read_layer_types(hf, alternating))


def read_gemma(
    hf: Mapping[str, Any],
    architecture: str,
    layer_types: tuple[str, ...],
    layers: Mapping[str, Sequence[Any]] | None = None,
    **overrides: Any,
) -> ModelConfig:
    """Read the fields that Gemma 2 and 3 share; `hf` includes the family's defaults, `layers` each layer's fields."""
    windows = windows_of(layer_types, read_optional_int(hf, "sliding_window"))
    bias = read_bool(hf, "attention_bias")
    fields: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias,
        "post_norms": True,
        "norm_offset": 1.0,
        "scale": read_float(hf, "query_pre_attn_scalar") ** -0.5,
        "embed_scale": read_int(hf, "hidden_size") ** 0.5,
        "soft_cap": read_optional_float(hf, "attn_logit_softcapping"),
        "final_soft_cap": read_optional_float(hf, "final_logit_softcapping"),
        "layers": {"window": windows, **(layers or {})},
    }
    return read_decoder(hf, architecture=architecture, act_key="hidden_activation", **(fields | overrides))


FAMILIES = {"Gemma2ForCausalLM": Family(config_from_hf=_gemma2_config, names=GEMMA_NAMES)}
