"""Falcon H1: Llama with Mamba-2 beside attention in every layer, and a factor on the result of every part."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import Factors, ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_floats, read_int, read_optional_int, require
from ..mixer_specs import ScanSpec
from ..reading import read_decoder, read_num_layers
from .llama import LLAMA_NAMES
from .mamba import in_feed_forward, read_scan, scan_names

_FALCON_H1_NAMES = MappingProxyType(in_feed_forward({**LLAMA_NAMES, **scan_names("{body}layers.{l}.mamba.")}))

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_norm_before_gate": True,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}


def _falcon_h1_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Falcon H1 config.json."""
    if "mamba_d_ssm" in hf and hf["mamba_d_ssm"] is None:
        hf = {**hf, "mamba_d_ssm": read_int(hf, "mamba_expand", 2) * read_int(hf, "hidden_size")}
    hf = DEFAULTS | dict(hf)
    require(hf, hidden_act="silu", mlp_bias=False)
    factor = {name: read_float(hf, name, 1.0) for name in _FACTORS}
    of_gate, of_down = _read_factors(hf, "mlp_multipliers", 2)
    bias, layers = read_bool(hf, "attention_bias"), read_num_layers(hf)
    head_dim = read_int(hf, "head_dim", read_int(hf, "hidden_size") // read_int(hf, "num_attention_heads"))
    return read_decoder(
        hf,
        architecture="FalconH1ForCausalLM",
        embed_scale=factor["embedding_multiplier"],
        logits_divisor=1 / factor["lm_head_multiplier"],
        # The factor on keys is one on scores.
        scale=head_dim**-0.5 * factor["key_multiplier"],
        qkv_bias=bias,
        o_bias=bias,
        attends_too=True,
        attention_factors=Factors(factor["attention_in_multiplier"], factor["attention_out_multiplier"]),
        state_factors=Factors(factor["ssm_in_multiplier"], factor["ssm_out_multiplier"]),
        # A factor on the gate alone is one on the MLP's input, which also multiplies what the gate multiplies.
        mlp_factors=Factors(of_gate, of_down / of_gate),
        layers={"state": [_read_scan(hf)] * layers},
    )


_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)


def _read_scan(hf: Mapping[str, Any]) -> ScanSpec:
    bias = read_bool(hf, "mamba_proj_bias")
    if bias != read_bool(hf, "projectors_bias"):
        raise ValueError(f"mamba_proj_bias is {bias} and projectors_bias is not, which is not supported")
    return read_scan(
        hf,
        read_optional_int(hf, "mamba_d_ssm"),
        has_norm=read_bool(hf, "mamba_rms_norm"),
        norms_before_gate=read_bool(hf, "mamba_norm_before_gate"),
        factors=_read_factors(hf, "ssm_multipliers", 5),
    )


def _read_factors(hf: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    factors = read_floats({name: DEFAULTS[name]} if hf.get(name) is None else hf, name)
    if len(factors) != count:
        raise ValueError(f"{name} has {len(factors)} numbers, expected {count}")
    return factors


FAMILIES = {"FalconH1ForCausalLM": Family(config_from_hf=_falcon_h1_config, names=_FALCON_H1_NAMES)}
