"""gpt-oss: sinks in the softmax, windows on every other layer, biases everywhere, and experts with a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_optional_int, require
from ..layers.moe import SWIGLU_GAIN
from ..names import Fused, TensorName
from ..reading import read_decoder, read_layer_types, read_num_layers, windows_of
from .llama import LLAMA_NAMES

_GATE_UP = Fused(("gate", "up"), axis=1, alternates=True)
_GATE_UP_BIAS = Fused(("gate_bias", "up_bias"), alternates=True)

# All experts are one tensor, [in, out] each, in which gate and up columns alternate.
_GPT_OSS_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.attn.sinks": TensorName("{body}layers.{l}.self_attn.sinks", "n -> n"),
        "layers.mlp.router.weight": TensorName("{body}layers.{l}.mlp.router.weight", "e d -> e d"),
        "layers.mlp.router.bias": TensorName("{body}layers.{l}.mlp.router.bias", "e -> e"),
        "layers.mlp.experts.gate": TensorName("{body}layers.{l}.mlp.experts.gate_up_proj", "d f -> f d", _GATE_UP),
        "layers.mlp.experts.up": TensorName("{body}layers.{l}.mlp.experts.gate_up_proj", "d f -> f d", _GATE_UP),
        "layers.mlp.experts.down": TensorName("{body}layers.{l}.mlp.experts.down_proj", "f d -> d f"),
        "layers.mlp.experts.gate_bias": TensorName(
            "{body}layers.{l}.mlp.experts.gate_up_proj_bias", "f -> f", _GATE_UP_BIAS
        ),
        "layers.mlp.experts.up_bias": TensorName(
            "{body}layers.{l}.mlp.experts.gate_up_proj_bias", "f -> f", _GATE_UP_BIAS
        ),
        "layers.mlp.experts.down_bias": TensorName("{body}layers.{l}.mlp.experts.down_proj_bias", "d -> d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a gpt-oss config.json."""
    hf = DEFAULTS | dict(hf)
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = _ROPE | {"rope_theta": hf["rope_theta"]}
    require(hf, swiglu_alpha=SWIGLU_GAIN)
    moe = MoESpec(
        num_experts=read_int(hf, "num_local_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "intermediate_size"),
        router_bias=True,
        normalizes=True,
        expert_bias=True,
        swiglu_limit=read_float(hf, "swiglu_limit"),
    )
    alternating = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(read_num_layers(hf)))
    bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture="GptOssForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        moe=moe,
        layers={"window": windows_of(read_layer_types(hf, alternating), read_optional_int(hf, "sliding_window"))},
    )


GPT_OSS = Family(config_from_hf=_gpt_oss_config, names=_GPT_OSS_NAMES)
FAMILIES = {"GptOssForCausalLM": GPT_OSS}
