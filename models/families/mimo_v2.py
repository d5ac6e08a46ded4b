"""MiMo V2: windows with sinks and more kv heads than global layers, small values, partial RoPE, experts by sigmoid."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec, RopeConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_ints, read_mapping, read_optional_float, require
from ..names import TensorName
from ..reading import (
    LAYER_TYPES,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_rope,
    read_sparse_layers,
    windows_of,
)
from .glm4_moe import GLM4_MOE_NAMES, read_groups, read_normalizer

_MIMO_V2_NAMES = MappingProxyType(
    {
        **GLM4_MOE_NAMES,
        "layers.attn.sinks": TensorName("{body}layers.{l}.self_attn.attention_sink_bias", "n -> n"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "max_position_embeddings": 131_072,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.334,
}
_THETAS = {"full_attention": ("rope_theta", 5_000_000.0), "sliding_attention": ("swa_rope_theta", 10_000.0)}


def _mimo_v2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a MiMo V2 config.json, with the keys of the hub or of HF."""
    hf = DEFAULTS | dict(hf)
    require(hf, attention_bias=False, scoring_func="sigmoid", topk_method="noaux_tc")
    for key, reason in (("n_shared_experts", "shared experts"), ("rope_scaling", "scaled RoPE")):
        if hf.get(key):
            raise ValueError(f"{key} is {hf[key]!r}; {reason} are not supported in this architecture")
    if hf.get("attention_projection_layout") not in (None, "split_qkv"):
        layout = hf["attention_projection_layout"]
        raise ValueError(f"attention_projection_layout is {layout!r}; only q_proj, k_proj and v_proj are supported")
    kinds = _read_kinds(hf)
    fields = [_ATTENTION_OF[kind](hf) for kind in kinds]
    # HF counts the token itself besides those of `sliding_window_size`, and among those of `sliding_window`.
    size = hf.get("sliding_window_size")
    window = read_int(hf, "sliding_window") if size is None else read_int(hf, "sliding_window_size") + 1
    moe = MoESpec(
        num_experts=read_int(hf, "n_routed_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "moe_intermediate_size"),
        sigmoid=True,
        correction_bias=True,
        **read_groups(hf),
        **read_normalizer(hf),
        routed_scale=read_float(hf, "routed_scaling_factor", 1.0),
    )
    return read_decoder(
        hf,
        architecture="MiMoV2FlashForCausalLM",
        norm_eps=read_float(hf, "rms_norm_eps", read_float(hf, "layernorm_epsilon", 1e-5)),
        v_scale=read_optional_float(hf, "attention_value_scale") or 1.0,
        ropes=tuple(_read_rope(hf, kind) for kind in LAYER_TYPES),
        layers={
            **{name: [each[name] for each in fields] for name in _full_attention(hf)},
            "window": windows_of(kinds, window),
            "rope": [LAYER_TYPES.index(kind) for kind in kinds],
            "moe": [moe if sparse else None for sparse in _read_sparse(hf)],
        },
    )


def _read_kinds(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return layer types; `hybrid_layer_pattern` has 1 for a window. By default the first and each sixth have none."""
    num_layers, pattern = read_num_layers(hf), read_ints(hf, "hybrid_layer_pattern")
    slides = pattern or [layer > 0 and (layer + 1) % 6 > 0 for layer in range(num_layers)]
    return read_layer_types(hf, tuple("sliding_attention" if each else "full_attention" for each in slides))


def _read_sparse(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has experts; `moe_layer_freq` has a 1 for them."""
    flags = read_ints(hf, "moe_layer_freq")
    return tuple(each > 0 for each in flags) if flags else read_sparse_layers(hf)


def _full_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = read_int(hf, "head_dim")
    return {
        "num_heads": read_int(hf, "num_attention_heads"),
        "num_kv_heads": read_int(hf, "num_key_value_heads"),
        "head_dim": head_dim,
        "padded_dim": _kernel_size(head_dim),
        "v_dim": read_int(hf, "v_head_dim"),
        "scale": head_dim**-0.5,
        "sinks": read_bool(hf, "add_full_attention_sink_bias"),
    }


def _sliding_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = read_int(hf, "swa_head_dim", read_int(hf, "head_dim"))
    return {
        "num_heads": read_int(hf, "swa_num_attention_heads", read_int(hf, "num_attention_heads")),
        "num_kv_heads": read_int(hf, "swa_num_key_value_heads", 2 * read_int(hf, "num_key_value_heads")),
        "head_dim": head_dim,
        "padded_dim": _kernel_size(head_dim),
        "v_dim": read_int(hf, "swa_v_head_dim", read_int(hf, "v_head_dim")),
        "scale": head_dim**-0.5,
        "sinks": read_bool(hf, "add_swa_attention_sink_bias", True),
    }


def _kernel_size(head_dim: int) -> int:
    """Return the next power of two: kernels of attention have heads of 128 or 256, and not of 192."""
    return 1 << (head_dim - 1).bit_length()


_ATTENTION_OF = {"full_attention": _full_attention, "sliding_attention": _sliding_attention}


def _read_rope(hf: Mapping[str, Any], kind: str) -> RopeConfig:
    """Return the RoPE table of a layer type. HF has one in `rope_parameters`, the hub may have keys, or one table."""
    parameters, (theta_key, theta) = read_mapping(hf, "rope_parameters"), _THETAS[kind]
    settings = {"rope_theta": read_float(hf, theta_key, theta)}
    if set(parameters) & set(LAYER_TYPES):
        settings |= read_mapping(parameters, kind)
    elif kind == "full_attention":
        settings |= parameters
    return read_rope(hf, settings, rotates_part=True)


# Towers, and layers that predict further tokens.
_OTHERS = ("model.mtp.*", "visual.*", "audio_*", "speech_embeddings.*")
_MIMO_V2 = Family(config_from_hf=_mimo_v2_config, names=_MIMO_V2_NAMES, leaves_out=_OTHERS)
FAMILIES = {"MiMoV2FlashForCausalLM": _MIMO_V2, "MiMoV2ForCausalLM": _MIMO_V2}
