"""Nomic Embed: BERT with rotary positions and gated MLPs, without biases beside those of norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..config import ModelConfig, Pooling, RopeConfig
from ..family import Family
from ..fields import read_choice, read_int, require
from ..layers import EncoderFrame, GatedMLP, GPTLayer
from ..names import Prefixes, TensorName
from ..pooling import EMBED
from ..reading import read_rope, read_rope_settings
from .bert import read_bert, token_classifier, with_classifier
from .gte import ROTARY_NAMES, packed_names

_LAYER = "{body}encoder.layers.{l}"
# The names of Nomic's own checkpoints.
_NOMIC_NAMES = {
    **packed_names(_LAYER, "attn.Wqkv", "attn.out_proj", ("norm1", "norm2"), is_biased=False),
    "embed_norm.scale": TensorName("{body}emb_ln.weight", "d -> d"),
    "embed_norm.bias": TensorName("{body}emb_ln.bias", "d -> d"),
    "layers.mlp.up": TensorName(f"{_LAYER}.mlp.fc11.weight", "f d -> f d"),
    "layers.mlp.gate": TensorName(f"{_LAYER}.mlp.fc12.weight", "f d -> f d"),
    "layers.mlp.down": TensorName(f"{_LAYER}.mlp.fc2.weight", "d f -> d f"),
}
_NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""HF's key for each of Nomic's own."""
_GATES = {"swiglu": "silu", "geglu": "gelu"}
# HF's values for keys that a config.json leaves out.
DEFAULTS = {"vocab_size": 30_528, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 1000.0}


def _nomic_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Nomic Embed, with Nomic's own keys or with HF's."""
    hf = DEFAULTS | (_read_own_keys(hf) if "n_embd" in hf else dict(hf))
    rope = _read_rope(hf)
    biases: dict[str, Any] = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
    return read_bert(hf, "NomicBertModel", Pooling(tasks=EMBED, kind="MEAN"), ropes=(rope,), rope=0, **biases)


def _read_own_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with HF's keys for Nomic's own."""
    if every := read_int(hf, "moe_every_n_layers", 0, minimum=0):
        raise ValueError(f"moe_every_n_layers is {every}: experts without gates, with one bias, are not supported")
    biases: dict[str, Any] = {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False}
    require(hf, prenorm=False, parallel_block=False, use_rms_norm=False, causal=False, **biases)
    require(hf, rotary_emb_interleaved=False, rotary_emb_scale_base=None, num_heads_kv=None)
    gate = read_choice(hf, "activation_function", tuple(_GATES), "swiglu")
    renamed = {theirs: hf[own] for own, theirs in _NOMIC_KEYS.items() if hf.get(own) is not None}
    rope = {"rope_theta": hf.get("rotary_emb_base", 1000), "partial_rotary_factor": hf.get("rotary_emb_fraction", 1.0)}
    return {**hf, **renamed, "hidden_act": _GATES[gate], "rope_parameters": rope}


def _read_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Read the RoPE table; `rotary_scaling_factor` makes it grow with texts that are longer than those of training."""
    settings = read_rope_settings(hf)
    if hf.get("rotary_scaling_factor") is not None:
        settings |= {"rope_type": "dynamic", "factor": hf["rotary_scaling_factor"]}
        hf = {**hf, "max_position_embeddings": read_int(hf, "max_trained_positions", 2048)}
    return read_rope(hf, settings, rotates_part=True)


def _nomic_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Nomic BERT that classifies texts, or pairs of texts."""
    return with_classifier(replace(_nomic_config(hf), architecture="NomicBertForSequenceClassification"), hf)


def _nomic_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Nomic BERT that classifies tokens."""
    return replace(_nomic_config(hf), architecture="NomicBertForTokenClassification", pooling=token_classifier(hf))


_NOMIC = Family(
    config_from_hf=_nomic_config,
    names=ROTARY_NAMES,
    other_names=(_NOMIC_NAMES,),
    layer=partial(GPTLayer, mlp=GatedMLP),
    frame=EncoderFrame,
    prefixes=tuple(Prefixes(body, "") for body in ("nomic_bert.", "bert.", "")),
    marks=("embed.table",),
    leaves_out=("*pooler.dense.*", "cls.*"),
)
FAMILIES = {
    "NomicBertModel": _NOMIC,
    "NomicBertForMaskedLM": _NOMIC,
    "NomicBertForPreTraining": _NOMIC,
    "NomicBertForSequenceClassification": replace(_NOMIC, config_from_hf=_nomic_classifier_config),
    "NomicBertForTokenClassification": replace(_NOMIC, config_from_hf=_nomic_token_classifier_config),
}
