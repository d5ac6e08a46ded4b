"""Jamba: layers of Mamba and a few of attention without positions; experts in every other layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..mixer_specs import SelectiveSpec
from ..names import TensorName
from ..reading import read_decoder, read_num_layers
from .llama import LLAMA_NAMES
from .mamba import in_feed_forward, selective_names

_MAMBA = "{body}layers.{l}.mamba."
_EXPERTS = "{body}layers.{l}.feed_forward."
_EXPERT = _EXPERTS + "experts.{e}."

_JAMBA_NAMES = MappingProxyType(
    {
        **in_feed_forward({**LLAMA_NAMES, **selective_names(_MAMBA)}),
        "layers.recurrent.step_norm": TensorName(_MAMBA + "dt_layernorm.weight", "r -> r"),
        "layers.recurrent.b_norm": TensorName(_MAMBA + "b_layernorm.weight", "n -> n"),
        "layers.recurrent.c_norm": TensorName(_MAMBA + "c_layernorm.weight", "n -> n"),
        "layers.mlp.router.weight": TensorName(_EXPERTS + "router.weight", "e d -> e d"),
        "layers.mlp.experts.gate": TensorName(_EXPERT + "gate_proj.weight", "f d -> f d"),
        "layers.mlp.experts.up": TensorName(_EXPERT + "up_proj.weight", "f d -> f d"),
        "layers.mlp.experts.down": TensorName(_EXPERT + "down_proj.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


def _jamba_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Jamba config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, hidden_act="silu")
    attends, has_experts = _every(hf, "attn_layer"), _every(hf, "expert_layer")
    scan, moe = _read_scan(hf), _read_experts(hf)
    return read_decoder(
        hf,
        architecture="JambaForCausalLM",
        rope=None,
        layers={
            "state": [None if each else scan for each in attends],
            "moe": [moe if each else None for each in has_experts],
        },
    )


def _every(hf: Mapping[str, Any], kind: str) -> list[bool]:
    """Return which layers are of a kind: one in each period, at an offset."""
    period, offset = read_int(hf, f"{kind}_period"), read_int(hf, f"{kind}_offset", minimum=0)
    if offset >= period:
        raise ValueError(f"{kind}_offset is {offset}, expected less than {kind}_period={period}")
    return [layer % period == offset for layer in range(read_num_layers(hf))]


def _read_scan(hf: Mapping[str, Any]) -> SelectiveSpec:
    hidden_size, rank = read_int(hf, "hidden_size"), hf.get("mamba_dt_rank")
    return SelectiveSpec(
        num_channels=read_int(hf, "mamba_expand") * hidden_size,
        state_dim=read_int(hf, "mamba_d_state"),
        dt_rank=math.ceil(hidden_size / 16) if rank in (None, "auto") else read_int(hf, "mamba_dt_rank"),
        conv_size=read_int(hf, "mamba_d_conv"),
        conv_bias=read_bool(hf, "mamba_conv_bias"),
        bias=read_bool(hf, "mamba_proj_bias"),
        norm_eps=read_float(hf, "rms_norm_eps", 1e-6),
        norm_scales=True,
    )


def _read_experts(hf: Mapping[str, Any]) -> MoESpec | None:
    num_experts = read_int(hf, "num_local_experts", read_int(hf, "num_experts"))
    if num_experts == 1:
        return None
    return MoESpec(
        num_experts=num_experts,
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "intermediate_size"),
    )


FAMILIES = {"JambaForCausalLM": Family(config_from_hf=_jamba_config, names=_JAMBA_NAMES)}
