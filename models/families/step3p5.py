"""Step 3.5: gates of heads on attention, windows with more heads, two RoPE tables, clipped experts by sigmoid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec, RopeConfig
from ..family import Family
from ..fields import read_float, read_int, read_ints, read_mapping, read_optional_int, require
from ..names import TensorName
from ..reading import (
    LAYER_TYPES,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_rope,
    windows_of,
)
from .llama import LLAMA_NAMES

_LAYER = "{body}layers.{l}."
_STEP3P5_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.attn.gate": TensorName(_LAYER + "self_attn.g_proj.weight", "n d -> n d"),
        "layers.mlp.router.weight": TensorName(_LAYER + "moe.gate.weight", "e d -> e d"),
        "layers.mlp.router.correction": TensorName(_LAYER + "moe.router_bias", "e -> e"),
        "layers.mlp.experts.gate": TensorName(_LAYER + "moe.gate_proj.weight", "f d -> f d"),
        "layers.mlp.experts.up": TensorName(_LAYER + "moe.up_proj.weight", "f d -> f d"),
        "layers.mlp.experts.down": TensorName(_LAYER + "moe.down_proj.weight", "d f -> d f"),
        "layers.mlp.shared.gate": TensorName(_LAYER + "share_expert.gate_proj.weight", "f d -> f d"),
        "layers.mlp.shared.up": TensorName(_LAYER + "share_expert.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName(_LAYER + "share_expert.down_proj.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "head_dim": 128,
    "num_attention_groups": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
}


def _step3p5_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Step 3.5 config.json. Its lists may go on with the layers that predict further tokens."""
    hf = DEFAULTS | dict(hf)
    hf["num_key_value_heads"] = hf["num_attention_groups"]
    require(
        hf,
        att_impl_type="GQA",
        attention_bias=False,
        moe_router_activation="sigmoid",
        norm_expert_weight=True,
        use_head_wise_attn_gate=True,
        use_moe_router_bias=True,
        use_qk_norm=True,
        zero_centered=True,
    )
    kinds = read_layer_types({"layer_types": _by_layer(hf, "layer_types", "full_attention")}, ())
    others = read_mapping(hf, "attention_other_setting")
    heads, kv_heads = read_int(hf, "num_attention_heads"), read_int(hf, "num_attention_groups")
    heads_of = {"full_attention": heads, "sliding_attention": read_int(others, "num_attention_heads", heads)}
    require(others, num_attention_groups=kv_heads, head_dim=read_int(hf, "head_dim"))
    sparse, limits = _read_sparse(hf), _read_limits(hf, "swiglu_limits")
    return read_decoder(
        hf,
        architecture="Step3p5ForCausalLM",
        norm_offset=1.0,
        qk_norm=True,
        output_gate=True,
        gate_by_head=True,
        ropes=tuple(_read_rope(hf, kinds, kind) for kind in LAYER_TYPES),
        layers={
            "num_heads": [heads_of[kind] for kind in kinds],
            "window": windows_of(kinds, read_optional_int(hf, "sliding_window")),
            "rope": [LAYER_TYPES.index(kind) for kind in kinds],
            "mlp_limit": _read_limits(hf, "swiglu_limits_shared"),
            "moe": [_read_moe(hf, limit) if layer in sparse else None for layer, limit in enumerate(limits)],
        },
    )


def _read_moe(hf: Mapping[str, Any], limit: float | None) -> MoESpec:
    """Return a layer's experts."""
    return MoESpec(
        num_experts=read_int(hf, "moe_num_experts"),
        top_k=read_int(hf, "moe_top_k"),
        intermediate_size=read_int(hf, "moe_intermediate_size"),
        sigmoid=True,
        correction_bias=True,
        normalizes=True,
        routed_scale=read_float(hf, "moe_router_scaling_factor", 1.0),
        act_limit=limit,
        shared_size=read_int(hf, "share_expert_dim"),
    )


def _read_sparse(hf: Mapping[str, Any]) -> Sequence[int]:
    """Return the numbers of the layers with experts, which `moe_layers_enum` may have with commas between."""
    numbers = hf.get("moe_layers_enum")
    if numbers is None:
        return range(3, read_num_layers(hf))
    if isinstance(numbers, str):
        texts = [text.strip() for text in numbers.split(",") if text.strip()]
        if not all(text.isdecimal() for text in texts):
            raise ValueError(f"moe_layers_enum is {numbers!r}, expected numbers of layers")
        numbers = [int(text) for text in texts]
    return read_ints({"moe_layers_enum": numbers}, "moe_layers_enum")


def _read_limits(hf: Mapping[str, Any], key: str) -> list[float | None]:
    """Return each layer's bound; 0 or null is none."""
    return [read_float({key: value}, key) if value else None for value in _by_layer(hf, key, None)]


def _read_rope(hf: Mapping[str, Any], kinds: Sequence[str], kind: str) -> RopeConfig:
    """Return the RoPE table of a layer type. Theta and the rotated part have a value for each layer.

    In HF, scaled RoPE is that of global layers alone.
    """
    layer = kinds.index(kind) if kind in kinds else 0
    theta, part = _by_layer(hf, "rope_theta", 10_000.0)[layer], _by_layer(hf, "partial_rotary_factors", 1.0)[layer]
    settings = {"rope_theta": theta, "partial_rotary_factor": part}
    if kind == "full_attention":
        settings |= read_mapping(hf, "rope_scaling")
    return read_rope(hf, settings, rotates_part=True)


def _by_layer(hf: Mapping[str, Any], key: str, default: Any) -> Sequence[Any]:
    """Return the values of the model's own layers, of a list or of one value for all."""
    values, num_layers = hf.get(key), read_num_layers(hf)
    if not isinstance(values, list | tuple):
        return [default if values is None else values] * num_layers
    if len(values) < num_layers:
        raise ValueError(f"{key} has {len(values)} values, and there are {num_layers} layers")
    return values[:num_layers]


FAMILIES = {
    "Step3p5ForCausalLM": Family(
        config_from_hf=_step3p5_config,
        names=_STEP3P5_NAMES,
        # The layers that predict further tokens, which come last.
        leaves_out=("model.layers.{after}.*",),
    )
}
