"""Llama 2, 3, 3.1, 3.2 and models of their shape, such as InternLM 3, SmolLM2, TinyLlama and Vicuna."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool
from ..names import TensorName
from ..reading import read_decoder

LLAMA_NAMES = MappingProxyType(
    {
        "embed.table": TensorName("{body}embed_tokens.weight", "v d -> v d"),
        "final_norm.scale": TensorName("{body}norm.weight", "d -> d"),
        "final_norm.bias": TensorName("{body}norm.bias", "d -> d"),
        "lm_head.table": TensorName("{head}lm_head.weight", "v d -> v d"),
        "lm_head.bias": TensorName("{head}lm_head.bias", "v -> v"),
        "layers.attn_norm.scale": TensorName("{body}layers.{l}.input_layernorm.weight", "d -> d"),
        "layers.attn_norm.bias": TensorName("{body}layers.{l}.input_layernorm.bias", "d -> d"),
        "layers.attn.q": TensorName("{body}layers.{l}.self_attn.q_proj.weight", "(n h) d -> n h d"),
        "layers.attn.k": TensorName("{body}layers.{l}.self_attn.k_proj.weight", "(k h) d -> k h d"),
        "layers.attn.v": TensorName("{body}layers.{l}.self_attn.v_proj.weight", "(k h) d -> k h d"),
        "layers.attn.o": TensorName("{body}layers.{l}.self_attn.o_proj.weight", "d c -> d c"),
        "layers.attn.q_bias": TensorName("{body}layers.{l}.self_attn.q_proj.bias", "(n h) -> n h"),
        "layers.attn.k_bias": TensorName("{body}layers.{l}.self_attn.k_proj.bias", "(k h) -> k h"),
        "layers.attn.v_bias": TensorName("{body}layers.{l}.self_attn.v_proj.bias", "(k h) -> k h"),
        "layers.attn.o_bias": TensorName("{body}layers.{l}.self_attn.o_proj.bias", "d -> d"),
        "layers.attn.q_norm.scale": TensorName("{body}layers.{l}.self_attn.q_norm.weight", "h -> h"),
        "layers.attn.k_norm.scale": TensorName("{body}layers.{l}.self_attn.k_norm.weight", "h -> h"),
        "layers.mlp_norm.scale": TensorName("{body}layers.{l}.post_attention_layernorm.weight", "d -> d"),
        "layers.mlp_norm.bias": TensorName("{body}layers.{l}.post_attention_layernorm.bias", "d -> d"),
        "layers.mlp.gate": TensorName("{body}layers.{l}.mlp.gate_proj.weight", "f d -> f d"),
        "layers.mlp.up": TensorName("{body}layers.{l}.mlp.up_proj.weight", "f d -> f d"),
        "layers.mlp.down": TensorName("{body}layers.{l}.mlp.down_proj.weight", "d f -> d f"),
        "layers.mlp.gate_bias": TensorName("{body}layers.{l}.mlp.gate_proj.bias", "f -> f"),
        "layers.mlp.up_bias": TensorName("{body}layers.{l}.mlp.up_proj.bias", "f -> f"),
        "layers.mlp.down_bias": TensorName("{body}layers.{l}.mlp.down_proj.bias", "d -> d"),
    }
)

# HF's values for keys that the text part of a wrapper's config.json leaves out.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
)


# HF's values for keys that a config.json leaves out.
_INTERNLM3_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
}


def _llama_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Llama config.json."""
    attention_bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture="LlamaForCausalLM",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=read_bool(hf, "mlp_bias"),
    )


def _internlm3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an InternLM 3 config.json; HF calls its `qkv_bias` and `bias` as Llama's."""
    hf = _INTERNLM3_DEFAULTS | dict(hf)
    bias = read_bool(hf, "bias", read_bool(hf, "mlp_bias"))
    return read_decoder(
        hf,
        architecture="InternLM3ForCausalLM",
        qkv_bias=read_bool(hf, "qkv_bias", read_bool(hf, "attention_bias")),
        o_bias=bias,
        mlp_bias=bias,
    )


LLAMA = Family(config_from_hf=_llama_config, names=LLAMA_NAMES)
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "InternLM3ForCausalLM": Family(config_from_hf=_internlm3_config, names=LLAMA_NAMES),
}
