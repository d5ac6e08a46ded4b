"""Granite: Llama with factors on scores, embeddings, logits and what layers add; some have experts, with a shared one.

Granite 4 has layers of Mamba-2 and a few of attention, or attention alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, require
from ..names import Fused, TensorName
from ..reading import read_decoder, read_layer_types, read_num_layers
from .llama import LLAMA_NAMES
from .mamba import read_scan, renamed_layer_types, scan_names

_LAYER_TYPES = ("linear_attention", "full_attention")
_SHARED = "{body}layers.{l}.shared_mlp."
_EXPERTS = "{body}layers.{l}.block_sparse_moe."
_GATE_UP = Fused(("gate", "up"))


def _shared_names(mlp: str) -> dict[str, TensorName]:
    """Return the names of the MLP that all tokens go through; its path is `mlp`."""
    return {
        f"{mlp}.gate": TensorName(_SHARED + "input_linear.weight", "f d -> f d", _GATE_UP),
        f"{mlp}.up": TensorName(_SHARED + "input_linear.weight", "f d -> f d", _GATE_UP),
        f"{mlp}.down": TensorName(_SHARED + "output_linear.weight", "d f -> d f"),
    }


# All experts are one tensor.
_GRANITE_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        **scan_names("{body}layers.{l}.mamba."),
        **_shared_names("layers.mlp"),
        **_shared_names("layers.mlp.shared"),
        "layers.mlp.router.weight": TensorName(_EXPERTS + "router.layer.weight", "e d -> e d"),
        "layers.mlp.experts.gate": TensorName(_EXPERTS + "input_linear.weight", "f d -> f d", _GATE_UP),
        "layers.mlp.experts.up": TensorName(_EXPERTS + "input_linear.weight", "f d -> f d", _GATE_UP),
        "layers.mlp.experts.down": TensorName(_EXPERTS + "output_linear.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}


def _granite_hybrid_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Granite 4 config.json; without local experts, layers have the shared MLP alone."""
    hf = DEFAULTS | dict(hf)
    require(hf, hidden_act="silu", normalization_function="rmsnorm")
    is_rotated = hf.get("position_embedding_type") is not None and (
        read_choice(hf, "position_embedding_type", ("rope", "nope"), "nope") == "rope"
    )
    scan = read_scan(hf)
    has_state = [kind == "linear_attention" for kind in _read_layer_types(hf)]
    if all(has_state):
        raise ValueError("layer_types has no layer of attention, which is not supported")
    return read_decoder(
        hf,
        architecture="GraniteMoeHybridForCausalLM",
        intermediate_size=read_int(hf, "shared_intermediate_size"),
        moe=_read_experts(hf),
        **_read_factors(hf),
        layers={
            "state": [scan if each else None for each in has_state],
            "rope": [0 if is_rotated and not each else None for each in has_state],
        },
    )


def _granite_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Granite 3 config.json."""
    return read_decoder(hf, architecture="GraniteForCausalLM", mlp_bias=read_bool(hf, "mlp_bias"), **_read_factors(hf))


def _granite_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Granite 3 with experts."""
    hf = DEFAULTS | {"shared_intermediate_size": 0} | dict(hf)
    moe = _read_experts(hf)
    if moe is None:
        raise ValueError("num_local_experts is 0, expected at least 1")
    architecture = "GraniteMoeSharedForCausalLM" if moe.shared_size else "GraniteMoeForCausalLM"
    return read_decoder(hf, architecture=architecture, moe=moe, **_read_factors(hf))


def _read_factors(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors, and whether attention has biases."""
    bias = read_bool(hf, "attention_bias")
    return {
        "embed_scale": read_float(hf, "embedding_multiplier", 1.0),
        "scales_inputs": True,
        "logits_divisor": read_float(hf, "logits_scaling", 1.0),
        "residual_scale": read_float(hf, "residual_multiplier", 1.0),
        "scale": read_float(hf, "attention_multiplier", 1.0),
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _read_layer_types(hf: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = hf.get("layer_types", hf.get("layers_block_type"))
    return read_layer_types(
        {"layer_types": renamed_layer_types(kinds)}, _LAYER_TYPES[:1] * read_num_layers(hf), _LAYER_TYPES
    )


def _read_experts(hf: Mapping[str, Any]) -> MoESpec | None:
    num_experts = read_int(hf, "num_local_experts", minimum=0)
    if num_experts == 0:
        return None
    return MoESpec(
        num_experts=num_experts,
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "intermediate_size", 11_008),
        # This is the softmax over the logits of the chosen experts.
        normalizes=True,
        shared_size=read_int(hf, "shared_intermediate_size", minimum=0) or None,
    )


_GRANITE_MOE = Family(config_from_hf=_granite_moe_config, names=_GRANITE_NAMES)
FAMILIES = {
    "GraniteForCausalLM": Family(config_from_hf=_granite_config, names=LLAMA_NAMES),
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": _GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": Family(config_from_hf=_granite_hybrid_config, names=_GRANITE_NAMES),
}
