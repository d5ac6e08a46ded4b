"""LFM2 and LFM2-MoE: layers with short convolutions between gates, and a few of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_ints
from ..mixer_specs import ConvSpec
from ..names import Fused, TensorName
from ..pooling import as_embedder, as_multi_vector
from ..reading import read_decoder, read_layer_types, read_num_layers
from .llama import LLAMA_NAMES

_CONV = "{body}layers.{l}.conv."
_ATTENTION = "{body}layers.{l}.self_attn."
_FEED_FORWARD = "{body}layers.{l}.feed_forward."
_LAYER_TYPES = ("conv", "full_attention")
_GATES = Fused(("gate_in", "gate_out", "x"))
_GATE_BIASES = Fused(("gate_in_bias", "gate_out_bias", "x_bias"))

LFM2_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "final_norm.scale": TensorName("{body}embedding_norm.weight", "d -> d"),
        "layers.attn_norm.scale": TensorName("{body}layers.{l}.operator_norm.weight", "d -> d"),
        "layers.mlp_norm.scale": TensorName("{body}layers.{l}.ffn_norm.weight", "d -> d"),
        "layers.attn.o": TensorName(_ATTENTION + "out_proj.weight", "d c -> d c"),
        "layers.attn.q_norm.scale": TensorName(_ATTENTION + "q_layernorm.weight", "h -> h"),
        "layers.attn.k_norm.scale": TensorName(_ATTENTION + "k_layernorm.weight", "h -> h"),
        "layers.mlp.gate": TensorName(_FEED_FORWARD + "w1.weight", "f d -> f d"),
        "layers.mlp.up": TensorName(_FEED_FORWARD + "w3.weight", "f d -> f d"),
        "layers.mlp.down": TensorName(_FEED_FORWARD + "w2.weight", "d f -> d f"),
        **{
            f"layers.recurrent.{name}": TensorName(_CONV + "in_proj.weight", "c d -> c d", _GATES)
            for name in _GATES.members
        },
        **{
            f"layers.recurrent.{name}": TensorName(_CONV + "in_proj.bias", "c -> c", _GATE_BIASES)
            for name in _GATE_BIASES.members
        },
        "layers.recurrent.conv": TensorName(_CONV + "conv.weight", "c u k -> c u k"),
        "layers.recurrent.conv_bias": TensorName(_CONV + "conv.bias", "c -> c"),
        "layers.recurrent.o": TensorName(_CONV + "out_proj.weight", "d c -> d c"),
        "layers.recurrent.o_bias": TensorName(_CONV + "out_proj.bias", "d -> d"),
    }
)
_EXPERT = _FEED_FORWARD + "experts.{e}."
_LFM2_MOE_NAMES = MappingProxyType(
    {
        **LFM2_NAMES,
        "layers.mlp.router.weight": TensorName(_FEED_FORWARD + "gate.weight", "e d -> e d"),
        "layers.mlp.router.correction": TensorName(_FEED_FORWARD + "expert_bias", "e -> e"),
        "layers.mlp.experts.gate": TensorName(_EXPERT + "w1.weight", "f d -> f d"),
        "layers.mlp.experts.up": TensorName(_EXPERT + "w3.weight", "f d -> f d"),
        "layers.mlp.experts.down": TensorName(_EXPERT + "w2.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_MOE_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
}


def _lfm2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an LFM2 config.json."""
    hf = DEFAULTS | dict(hf)
    return _read(hf, "Lfm2ForCausalLM", intermediate_size=_mlp_width(hf))


def _lfm2_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an LFM2-MoE config.json: the first `num_dense_layers` layers have MLPs."""
    hf = _MOE_DEFAULTS | dict(hf)
    moe = MoESpec(
        num_experts=read_int(hf, "num_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "moe_intermediate_size"),
        sigmoid=True,
        correction_bias=read_bool(hf, "use_expert_bias"),
        normalizes=read_bool(hf, "norm_topk_prob"),
        normalizer_eps=1e-6,
        routed_scale=read_float(hf, "routed_scaling_factor", 1.0),
    )
    num_dense = read_int(hf, "num_dense_layers", minimum=0)
    experts = [None if layer < num_dense else moe for layer in range(read_num_layers(hf))]
    return _read(hf, "Lfm2MoeForCausalLM", layers={"moe": experts})


def _read(hf: Mapping[str, Any], architecture: str, **fields: Any) -> ModelConfig:
    num_layers = read_num_layers(hf)
    attends = range(num_layers) if hf.get("full_attn_idxs") is None else read_ints(hf, "full_attn_idxs")
    default = tuple(_LAYER_TYPES[layer in attends] for layer in range(num_layers))
    types = read_layer_types(hf, default, _LAYER_TYPES)
    rope = [None if kind == "conv" else 0 for kind in types]
    layers = {"rope": rope, **fields.pop("layers", {})}
    return read_hybrid(hf, types, architecture=architecture, layers=layers, **fields)


def read_hybrid(
    hf: Mapping[str, Any], types: Sequence[str], *, layers: Mapping[str, Any], **fields: Any
) -> ModelConfig:
    """Read the fields that the LFM families share; layers of the type "conv" are short convolutions.

    `layers` and `fields` are further ones, as `read_decoder` takes them.
    """
    conv = ConvSpec(
        num_channels=read_int(hf, "hidden_size"),
        conv_size=read_int(hf, "conv_L_cache"),
        bias=read_bool(hf, "conv_bias"),
    )
    return read_decoder(
        hf,
        norm_eps=read_float(hf, "norm_eps"),
        # Older configs have this key.
        tie_word_embeddings=read_bool(hf, "tie_embedding", read_bool(hf, "tie_word_embeddings")),
        qk_norm=True,
        layers={"state": [conv if kind == "conv" else None for kind in types], **layers},
        **fields,
    )


def _mlp_width(hf: Mapping[str, Any]) -> int:
    """Return the width of the MLPs: in most configs two thirds of the key's value, times a factor, rounded up."""
    width = read_int(hf, "block_ff_dim", read_int(hf, "intermediate_size", 12_288))
    if not read_bool(hf, "block_auto_adjust_ff_dim"):
        return width
    multiple = read_int(hf, "block_multiple_of")
    width = int(read_float(hf, "block_ffn_dim_multiplier") * int(2 * width / 3))
    return -(-width // multiple) * multiple


_LFM2 = Family(config_from_hf=_lfm2_config, names=LFM2_NAMES)
FAMILIES = {
    "Lfm2ForCausalLM": _LFM2,
    "ColBERTLfm2Model": as_multi_vector(as_embedder(_LFM2)),
    "Lfm2MoeForCausalLM": Family(config_from_hf=_lfm2_moe_config, names=_LFM2_MOE_NAMES),
}
