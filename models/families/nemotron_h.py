"""Nemotron-H, and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_optional_int, require
from ..mixer_specs import ScanSpec
from ..names import DECODER_PREFIXES, Prefixes, TensorName
from ..reading import MAX_LAYERS, read_decoder, read_layer_types
from .glm4_moe import read_groups, read_normalizer
from .llama import LLAMA_NAMES
from .mamba import read_time_limits, renamed_layer_types, scan_names

_LETTERS = MappingProxyType({"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"})
_LAYER_TYPES = tuple(_LETTERS.values())
_MIXER = "{body}layers.{l}.mixer."
_NORM = TensorName("{body}layers.{l}.norm.weight", "d -> d")

_NEMOTRON_H_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "embed.table": TensorName("{body}embeddings.weight", "v d -> v d"),
        "final_norm.scale": TensorName("{body}norm_f.weight", "d -> d"),
        "layers.attn_norm.scale": _NORM,
        "layers.mlp_norm.scale": _NORM,
        **scan_names(_MIXER),
        "layers.attn.q": TensorName(_MIXER + "q_proj.weight", "(n h) d -> n h d"),
        "layers.attn.k": TensorName(_MIXER + "k_proj.weight", "(k h) d -> k h d"),
        "layers.attn.v": TensorName(_MIXER + "v_proj.weight", "(k h) d -> k h d"),
        "layers.attn.o": TensorName(_MIXER + "o_proj.weight", "d c -> d c"),
        "layers.mlp.up": TensorName(_MIXER + "up_proj.weight", "f d -> f d"),
        "layers.mlp.down": TensorName(_MIXER + "down_proj.weight", "d f -> d f"),
        "layers.mlp.up_bias": TensorName(_MIXER + "up_proj.bias", "f -> f"),
        "layers.mlp.down_bias": TensorName(_MIXER + "down_proj.bias", "d -> d"),
        "layers.mlp.router.weight": TensorName(_MIXER + "gate.weight", "e d -> e d"),
        "layers.mlp.router.correction": TensorName(_MIXER + "gate.e_score_correction_bias", "e -> e"),
        "layers.mlp.experts.up": TensorName(_MIXER + "experts.{e}.up_proj.weight", "f d -> f d"),
        "layers.mlp.experts.down": TensorName(_MIXER + "experts.{e}.down_proj.weight", "d f -> d f"),
        "layers.mlp.shared.up": TensorName(_MIXER + "shared_experts.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName(_MIXER + "shared_experts.down_proj.weight", "d f -> d f"),
        "layers.mlp.into_latents": TensorName(_MIXER + "fc1_latent_proj.weight", "l d -> l d"),
        "layers.mlp.out_of_latents": TensorName(_MIXER + "fc2_latent_proj.weight", "d l -> d l"),
    }
)

# HF's values for keys that a config.json leaves out, and for other names of keys.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_OLD_KEYS = MappingProxyType(
    {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
    }
)


def _nemotron_h_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Nemotron-H config.json."""
    hf = DEFAULTS | {_OLD_KEYS.get(key, key): value for key, value in hf.items()}
    require(hf, mamba_hidden_act="silu", attention_bias=False)
    if hf.get("sliding_window") is not None:
        raise ValueError("sliding_window is not supported in this architecture")
    types = _read_layer_types(hf)
    if "full_attention" not in types:
        raise ValueError("hybrid_override_pattern has no layer of attention, which is not supported")
    moe, scan = _read_experts(hf) if "moe" in types else None, _read_scan(hf)
    return read_decoder(
        hf | {"num_hidden_layers": len(types)},
        architecture="NemotronHForCausalLM",
        act_key="mlp_hidden_act",
        norm_eps=read_float(hf, "layer_norm_epsilon"),
        mlp_bias=read_bool(hf, "mlp_bias"),
        gated=False,
        rope=None,
        layers={
            "state": [scan if kind == "linear_attention" else None for kind in types],
            "moe": [moe if kind == "moe" else None for kind in types],
            "has_mixer": [kind in ("linear_attention", "full_attention") for kind in types],
            "has_mlp": [kind in ("mlp", "moe") for kind in types],
        },
    )


def _read_layer_types(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; older configs have a pattern of letters."""
    kinds, pattern = hf.get("layers_block_type", hf.get("layer_types")), hf.get("hybrid_override_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set(_LETTERS):
            raise ValueError(f"hybrid_override_pattern is {pattern!r}, expected letters of {''.join(_LETTERS)}")
        kinds = [_LETTERS[letter] for letter in pattern]
    types = read_layer_types({"layer_types": renamed_layer_types(kinds)}, (), _LAYER_TYPES)
    if not 0 < len(types) <= MAX_LAYERS:
        raise ValueError(f"hybrid_override_pattern has {len(types)} layers, expected 1 to {MAX_LAYERS}")
    return types


def _read_scan(hf: Mapping[str, Any]) -> ScanSpec:
    return ScanSpec(
        num_heads=read_int(hf, "mamba_num_heads"),
        head_dim=read_int(hf, "mamba_head_dim"),
        num_groups=read_int(hf, "n_groups"),
        state_dim=read_int(hf, "ssm_state_size"),
        conv_size=read_int(hf, "conv_kernel"),
        conv_bias=read_bool(hf, "use_conv_bias"),
        bias=read_bool(hf, "use_bias"),
        # HF also clips time steps of prompts, but not of decodes, to `time_step_min`; NVIDIA's own code does not.
        dt_limits=read_time_limits(hf),
    )


def _read_experts(hf: Mapping[str, Any]) -> MoESpec:
    if read_bool(hf, "mlp_bias"):
        raise ValueError("mlp_bias is not supported in layers with experts")
    return MoESpec(
        num_experts=read_int(hf, "n_routed_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "moe_intermediate_size"),
        sigmoid=True,
        correction_bias=True,
        **read_groups(hf),
        **read_normalizer(hf),
        routed_scale=read_float(hf, "routed_scaling_factor", 1.0),
        shared_size=read_int(hf, "moe_shared_expert_intermediate_size"),
        latent_size=read_optional_int(hf, "moe_latent_size"),
    )


# The multi-token-prediction layers are left out.
FAMILIES = {
    "NemotronHForCausalLM": Family(
        config_from_hf=_nemotron_h_config,
        names=_NEMOTRON_H_NAMES,
        prefixes=(Prefixes("backbone.", ""), DECODER_PREFIXES),
        leaves_out=("mtp.*",),
    )
}
