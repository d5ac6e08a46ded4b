"""AFMoE, such as Trinity: gated attention in windows, global layers without RoPE, four norms, experts by sigmoid."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_optional_int, require
from ..names import TensorName
from ..reading import every_nth_global, read_decoder, read_layer_types, read_num_layers, windows_of
from .glm4_moe import GLM4_MOE_NAMES

_LAYER = "{body}layers.{l}."
_AFMOE_NAMES = MappingProxyType(
    {
        **GLM4_MOE_NAMES,
        "layers.attn.gate": TensorName(_LAYER + "self_attn.gate_proj.weight", "(n h) d -> n h d"),
        "layers.post_attn_norm.scale": TensorName(_LAYER + "post_attention_layernorm.weight", "d -> d"),
        "layers.mlp_norm.scale": TensorName(_LAYER + "pre_mlp_layernorm.weight", "d -> d"),
        "layers.post_mlp_norm.scale": TensorName(_LAYER + "post_mlp_layernorm.weight", "d -> d"),
        "layers.mlp.router.weight": TensorName(_LAYER + "mlp.router.gate.weight", "e d -> e d"),
        "layers.mlp.router.correction": TensorName(_LAYER + "mlp.expert_bias", "e -> e"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
}


def _afmoe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an AFMoE config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, attention_bias=False, score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
    num_layers, width = read_num_layers(hf), read_int(hf, "moe_intermediate_size")
    kinds = read_layer_types(hf, every_nth_global(num_layers, read_int(hf, "global_attn_every_n_layers")))
    moe = MoESpec(
        num_experts=read_int(hf, "num_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=width,
        sigmoid=True,
        correction_bias=True,
        normalizes=True,
        normalizer_eps=1e-20,
        routed_scale=read_float(hf, "route_scale", 1.0),
        shared_size=width * read_int(hf, "num_shared_experts"),
    )
    dense = read_int(hf, "num_dense_layers", minimum=0)
    return read_decoder(
        hf,
        architecture="AfmoeForCausalLM",
        embed_scale=read_int(hf, "hidden_size") ** 0.5 if read_bool(hf, "mup_enabled") else 1.0,
        scales_inputs=True,
        output_gate=True,
        qk_norm=True,
        post_norms=True,
        layers={
            "window": windows_of(kinds, read_optional_int(hf, "sliding_window")),
            "rope": [0 if kind == "sliding_attention" else None for kind in kinds],
            "moe": [None if layer < dense else moe for layer in range(num_layers)],
        },
    )


FAMILIES = {"AfmoeForCausalLM": Family(config_from_hf=_afmoe_config, names=_AFMOE_NAMES)}
