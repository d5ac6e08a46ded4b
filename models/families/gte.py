"""GTE, and what it shares with Nomic Embed and Jina v3: BERT with rotary positions instead of learned ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import require
from ..layers import EncoderFrame, GatedMLP, GPTLayer
from ..names import Fused, Prefixes, TensorName
from ..reading import read_rope, read_rope_settings
from .bert import EMBEDDING, read_bert, token_classifier, with_classifier
from .llama import LLAMA_NAMES

_LAYER = "{body}layers.{l}"
ROTARY_NAMES: Mapping[str, TensorName] = MappingProxyType(
    {
        "embed.table": TensorName("{body}embeddings.word_embeddings.weight", "v d -> v d"),
        "types": TensorName("{body}embeddings.token_type_embeddings.weight", "y d -> y d"),
        "embed_norm.scale": TensorName("{body}embeddings.LayerNorm.weight", "d -> d"),
        "embed_norm.bias": TensorName("{body}embeddings.LayerNorm.bias", "d -> d"),
        **{path: name for path, name in LLAMA_NAMES.items() if path.startswith(("layers.attn.", "layers.mlp."))},
        "layers.attn_norm.scale": TensorName(f"{_LAYER}.post_attention_layernorm.weight", "d -> d"),
        "layers.attn_norm.bias": TensorName(f"{_LAYER}.post_attention_layernorm.bias", "d -> d"),
        "layers.mlp_norm.scale": TensorName(f"{_LAYER}.post_mlp_layernorm.weight", "d -> d"),
        "layers.mlp_norm.bias": TensorName(f"{_LAYER}.post_mlp_layernorm.bias", "d -> d"),
    }
)


def packed_names(layer: str, qkv: str, out: str, norms: tuple[str, str], *, is_biased: bool) -> dict[str, TensorName]:
    """Return the names of attention and norms in the first checkpoints, which have one tensor for q, k and v."""
    parts = (("q", "n"), ("k", "k"), ("v", "k"))
    weights, biases = Fused(("q", "k", "v")), Fused(("q_bias", "k_bias", "v_bias"))
    names = {
        **{
            f"layers.attn.{part}": TensorName(f"{layer}.{qkv}.weight", f"({n} h) d -> {n} h d", weights)
            for part, n in parts
        },
        "layers.attn.o": TensorName(f"{layer}.{out}.weight", "d c -> d c"),
    }
    if is_biased:
        names |= {
            f"layers.attn.{part}_bias": TensorName(f"{layer}.{qkv}.bias", f"({n} h) -> {n} h", biases)
            for part, n in parts
        }
        names["layers.attn.o_bias"] = TensorName(f"{layer}.{out}.bias", "d -> d")
    for path, norm in zip(("attn_norm", "mlp_norm"), norms, strict=True):
        names[f"layers.{path}.scale"] = TensorName(f"{layer}.{norm}.weight", "d -> d")
        names[f"layers.{path}.bias"] = TensorName(f"{layer}.{norm}.bias", "d -> d")
    return names


_OLD, _UP_GATE = "{body}encoder.layer.{l}", Fused(("up", "gate"))
_OLD_NAMES = {
    **packed_names(_OLD, "attention.qkv_proj", "attention.o_proj", ("attn_ln", "mlp_ln"), is_biased=True),
    "layers.mlp.up": TensorName(f"{_OLD}.mlp.up_gate_proj.weight", "f d -> f d", _UP_GATE),
    "layers.mlp.gate": TensorName(f"{_OLD}.mlp.up_gate_proj.weight", "f d -> f d", _UP_GATE),
    "layers.mlp.down": TensorName(f"{_OLD}.mlp.down_proj.weight", "d f -> d f"),
    "layers.mlp.down_bias": TensorName(f"{_OLD}.mlp.down_proj.bias", "d -> d"),
}
# HF's values for keys that a config.json leaves out.
DEFAULTS = {"vocab_size": 250_048, "max_position_embeddings": 8192, "type_vocab_size": 1, "rope_theta": 160_000.0}


def _gte_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GTE that embeds."""
    hf = DEFAULTS | dict(hf)
    require(hf, layer_norm_type="layer_norm", pack_qkv=True, logn_attention_scale=False, logn_attention_clip1=False)
    biases: dict[str, Any] = {"mlp_bias": True, "gate_bias": False}
    rope = read_rope(hf, read_rope_settings(hf))
    return read_bert(hf, "GteModel", EMBEDDING, positions="rope", min_types=0, ropes=(rope,), rope=0, **biases)


def _gte_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GTE that classifies texts, or pairs of texts."""
    return with_classifier(replace(_gte_config(hf), architecture="GteForSequenceClassification"), hf)


def _gte_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GTE that classifies tokens."""
    return replace(_gte_config(hf), architecture="GteForTokenClassification", pooling=token_classifier(hf))


_GTE = Family(
    config_from_hf=_gte_config,
    names=ROTARY_NAMES,
    other_names=(_OLD_NAMES,),
    layer=partial(GPTLayer, mlp=GatedMLP),
    frame=EncoderFrame,
    prefixes=tuple(Prefixes(body, "") for body in ("gte.", "new.", "")),
    marks=("embed.table",),
    # GTE multilingual's head for weights of words is a classifier of tokens.
    leaves_out=("*pooler.dense.*", "lm_head.*", "classifier.*"),
)
FAMILIES = {
    **dict.fromkeys(("GteModel", "NewModel", "GteNewModel", "SnowflakeGteNewModel"), _GTE),
    **dict.fromkeys(("GteForMaskedLM", "NewForMaskedLM"), _GTE),
    **dict.fromkeys(
        ("GteForSequenceClassification", "NewForSequenceClassification", "GteNewForSequenceClassification"),
        replace(_GTE, config_from_hf=_gte_classifier_config),
    ),
    **dict.fromkeys(
        ("GteForTokenClassification", "NewForTokenClassification"),
        replace(_GTE, config_from_hf=_gte_token_classifier_config),
    ),
}
