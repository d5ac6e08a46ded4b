"""Qwen3-Next: three layers of gated delta nets to each of gated attention, with experts.

Its successors have the same layers: see `qwen3_5.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_int, require
from ..mixer_specs import DeltaSpec
from ..names import Fused, TensorName
from ..reading import read_decoder, read_layer_types, read_num_layers
from .qwen_moe import QWEN2_MOE_NAMES, read_qwen_moe

DELTA = "{body}layers.{l}.linear_attn."
_LAYER_TYPES = ("linear_attention", "full_attention")
# Each key head has its own part of these tensors, with the values of its value heads.
_QKVZ = Fused(("q", "k", "v", "gate"), by_head=True)
_QKV = Fused(("q", "k", "v"))
_BETA_DECAY = Fused(("beta", "decay"), by_head=True)
_CONVOLUTIONS = Fused(("q_conv", "k_conv", "v_conv"))
_QUERY_GATE = Fused(("q", "gate"), by_head=True)

DELTA_NAMES = MappingProxyType(
    {
        **{
            f"layers.recurrent.{name}": TensorName(DELTA + "conv1d.weight", "c u k -> c u k", _CONVOLUTIONS)
            for name in _CONVOLUTIONS.members
        },
        "layers.recurrent.log_decay": TensorName(DELTA + "A_log", "v -> v"),
        "layers.recurrent.decay_bias": TensorName(DELTA + "dt_bias", "v -> v"),
        "layers.recurrent.norm": TensorName(DELTA + "norm.weight", "h -> h"),
        "layers.recurrent.o": TensorName(DELTA + "out_proj.weight", "d c -> d c"),
        "layers.attn.q": TensorName("{body}layers.{l}.self_attn.q_proj.weight", "(n h) d -> n h d", _QUERY_GATE),
        "layers.attn.gate": TensorName("{body}layers.{l}.self_attn.q_proj.weight", "(n h) d -> n h d", _QUERY_GATE),
    }
)
_QWEN3_NEXT_NAMES = MappingProxyType(
    {
        **QWEN2_MOE_NAMES,
        **DELTA_NAMES,
        **{
            f"layers.recurrent.{name}": TensorName(DELTA + "in_proj_qkvz.weight", "c d -> c d", _QKVZ)
            for name in _QKVZ.members
        },
        **{
            f"layers.recurrent.{name}": TensorName(DELTA + "in_proj_ba.weight", "c d -> c d", _BETA_DECAY)
            for name in _BETA_DECAY.members
        },
    }
)

SPLIT_NAMES = MappingProxyType(
    {
        **{
            f"layers.recurrent.{name}": TensorName(DELTA + "in_proj_qkv.weight", "c d -> c d", _QKV)
            for name in _QKV.members
        },
        "layers.recurrent.gate": TensorName(DELTA + "in_proj_z.weight", "c d -> c d"),
    }
)
"""The names of the projections in Qwen3.5, and in GGUF files of Qwen3-Next."""

# HF's values for keys that a config.json leaves out.
DELTA_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DEFAULTS: dict[str, Any] = DELTA_DEFAULTS | {
    "intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


def _qwen3_next_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3-Next config.json."""
    hf = DEFAULTS | dict(hf)
    return read_delta_decoder(hf, "Qwen3NextForCausalLM", {"moe": read_gated_moe(hf)})


def read_gated_moe(hf: Mapping[str, Any]) -> list[Any]:
    """Return each layer's experts, with a shared one behind a gate."""
    shared = read_int(hf, "shared_expert_intermediate_size", 512)
    return list(read_qwen_moe(hf, shared_size=shared, shared_gate=True))


def read_delta_decoder(
    hf: Mapping[str, Any], architecture: str, layers: Mapping[str, Any] | None = None, **fields: Any
) -> ModelConfig:
    """Read a decoder with layers of gated delta nets and layers of attention with an output gate."""
    require(hf, attention_bias=False)
    interval = read_int(hf, "full_attention_interval", 4)
    default = tuple(_LAYER_TYPES[(layer + 1) % interval == 0] for layer in range(read_num_layers(hf)))
    has_state = [kind == "linear_attention" for kind in read_layer_types(hf, default, _LAYER_TYPES)]
    delta = DeltaSpec(
        num_key_heads=read_int(hf, "linear_num_key_heads"),
        num_value_heads=read_int(hf, "linear_num_value_heads"),
        key_dim=read_int(hf, "linear_key_head_dim"),
        value_dim=read_int(hf, "linear_value_head_dim"),
        conv_size=read_int(hf, "linear_conv_kernel_dim"),
    )
    return read_decoder(
        hf,
        architecture=architecture,
        rotates_part=True,
        norm_offset=1.0,
        qk_norm=True,
        output_gate=True,
        layers={
            "state": [delta if each else None for each in has_state],
            "rope": [None if each else 0 for each in has_state],
            **(layers or {}),
        },
        **fields,
    )


FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        config_from_hf=_qwen3_next_config,
        names=_QWEN3_NEXT_NAMES,
        other_names=(SPLIT_NAMES,),
        # The multi-token-prediction layers.
        leaves_out=("mtp.*",),
    )
}
