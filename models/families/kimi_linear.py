"""Kimi Linear: three layers of Kimi's delta attention to each of attention over latents that rotates nothing.

The first MLP is dense, all others are experts as in DeepSeek V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_int, read_ints, read_mapping, require
from ..mixer_specs import DeltaSpec
from ..names import TensorName
from ..reading import read_layer_types, read_num_layers
from .deepseek import DEEPSEEK_NAMES, read_latent_decoder, read_sigmoid_experts

_ATTENTION, _EXPERTS = "{body}layers.{l}.self_attn.", "{body}layers.{l}.block_sparse_moe."
KIMI_NAMES = MappingProxyType(
    {
        **DEEPSEEK_NAMES,
        **{
            f"layers.recurrent.{name}": TensorName(f"{_ATTENTION}{name}_proj.weight", "c d -> c d")
            for name in ("q", "k", "v")
        },
        **{
            f"layers.recurrent.{name}_conv": TensorName(f"{_ATTENTION}{name}_conv1d.weight", "c u k -> c u k")
            for name in ("q", "k", "v")
        },
        "layers.recurrent.beta": TensorName(_ATTENTION + "b_proj.weight", "c d -> c d"),
        "layers.recurrent.decay_a": TensorName(_ATTENTION + "f_a_proj.weight", "r d -> r d"),
        "layers.recurrent.decay_b": TensorName(_ATTENTION + "f_b_proj.weight", "(v k) r -> v k r"),
        "layers.recurrent.gate_a": TensorName(_ATTENTION + "g_a_proj.weight", "r d -> r d"),
        "layers.recurrent.gate_b": TensorName(_ATTENTION + "g_b_proj.weight", "(v h) r -> v h r"),
        "layers.recurrent.log_decay": TensorName(_ATTENTION + "A_log", "1 1 v 1 -> v"),
        "layers.recurrent.decay_bias": TensorName(_ATTENTION + "dt_bias", "(v k) -> v k"),
        "layers.recurrent.norm": TensorName(_ATTENTION + "o_norm.weight", "h -> h"),
        "layers.recurrent.o": TensorName(_ATTENTION + "o_proj.weight", "d c -> d c"),
        "layers.mlp.router.weight": TensorName(_EXPERTS + "gate.weight", "e d -> e d"),
        "layers.mlp.router.correction": TensorName(_EXPERTS + "gate.e_score_correction_bias", "e -> e"),
        "layers.mlp.experts.gate": TensorName(_EXPERTS + "experts.{e}.w1.weight", "f d -> f d"),
        "layers.mlp.experts.up": TensorName(_EXPERTS + "experts.{e}.w3.weight", "f d -> f d"),
        "layers.mlp.experts.down": TensorName(_EXPERTS + "experts.{e}.w2.weight", "d f -> d f"),
        "layers.mlp.shared.gate": TensorName(_EXPERTS + "shared_experts.gate_proj.weight", "f d -> f d"),
        "layers.mlp.shared.up": TensorName(_EXPERTS + "shared_experts.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName(_EXPERTS + "shared_experts.down_proj.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "model_max_length": 1_048_576,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "num_expert_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
}
# DeepSeek's names for the same keys.
RENAMED = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}


def _kimi_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Kimi Linear config.json."""
    hf = DEFAULTS | dict(hf)
    hf |= {name: hf[kimi] for name, kimi in RENAMED.items()}
    require(hf, mla_use_nope=True, moe_router_activation_func="sigmoid", attention_bias=False)
    linear = read_mapping(hf, "linear_attn_config")
    head_dim, num_heads = (
        read_int(linear, name, read_int(hf, f"linear_{name}", default))
        for name, default in (("head_dim", 128), ("num_heads", 32))
    )
    delta = DeltaSpec(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_size=read_int(linear, "short_conv_kernel_size", read_int(hf, "linear_conv_kernel_dim", 4)),
        decays_by_key=True,
        gate_rank=head_dim,
    )
    return read_latent_decoder(
        hf,
        "KimiLinearForCausalLM",
        read_sigmoid_experts(hf),
        layers={
            "state": [delta if has_state else None for has_state in _read_layers(hf, linear)],
            "rope": [None] * read_num_layers(hf),
        },
    )


def _read_layers(hf: Mapping[str, Any], linear: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has a state; published files count layers from 1."""
    num_layers = read_num_layers(hf)
    if hf.get("layer_types") is not None:
        kinds = read_layer_types(hf, (), ("linear_attention", "full_attention"))
        return tuple(kind == "linear_attention" for kind in kinds)
    states, others = (read_ints(linear, name) for name in ("kda_layers", "full_attn_layers"))
    if not states and not others:
        return tuple(layer == 0 or layer % 4 != 0 for layer in range(num_layers))
    if sorted(states + others) != list(range(1, num_layers + 1)):
        raise ValueError(f"linear_attn_config has kda_layers and full_attn_layers that are not {num_layers} layers")
    return tuple(layer + 1 in states for layer in range(num_layers))


FAMILIES = {"KimiLinearForCausalLM": Family(config_from_hf=_kimi_config, names=KIMI_NAMES)}
