"""DeBERTa v2 and v3: BERT whose scores depend on contents and on the distances of tokens, apart from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import HEAD_ACTS, ModelConfig
from ..fields import read_choice, read_int, require
from ..mixer_specs import RelativeSpec
from ..names import TensorName
from .bert import BERT, EMBEDDING, old_and_new_norms, read_bert, token_classifier, with_classifier

_SELF = "{body}encoder.layer.{l}.attention.self"
_PARTS = (("q", "n", "query"), ("k", "k", "key"), ("v", "k", "value"))
_DEBERTA_NAMES = MappingProxyType(
    {
        **BERT.names,
        **{
            f"layers.attn.{p}": TensorName(f"{_SELF}.{name}_proj.weight", f"({n} h) d -> {n} h d")
            for p, n, name in _PARTS
        },
        **{
            f"layers.attn.{p}_bias": TensorName(f"{_SELF}.{name}_proj.bias", f"({n} h) -> {n} h")
            for p, n, name in _PARTS
        },
        "distances": TensorName("{body}encoder.rel_embeddings.weight", "p d -> p d"),
        "distance_norm.scale": TensorName("{body}encoder.LayerNorm.{scale}", "d -> d"),
        "distance_norm.bias": TensorName("{body}encoder.LayerNorm.{shift}", "d -> d"),
    }
)
# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 128_100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "relative_attention": False,
    "position_biased_input": True,
}


def _deberta_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a DeBERTa that embeds."""
    hf = DEFAULTS | dict(hf)
    if read_int(hf, "conv_kernel_size", 0, minimum=0):
        raise ValueError(
            f"conv_kernel_size is {hf['conv_kernel_size']}: the convolution of deberta-v2-xlarge and -xxlarge is not "
            "supported, only models without one, such as deberta-v3"
        )
    hidden_size = read_int(hf, "hidden_size")
    require(hf, relative_attention=True, position_biased_input=False, embedding_size=hidden_size)
    kinds = hf.get("pos_att_type")
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or sorted(map(str, kinds)) != ["c2p", "p2c"]:
        raise ValueError(f"pos_att_type is {kinds!r}; only p2c and c2p together are supported")
    if hf.get("share_att_key") is not True:
        raise ValueError(f"share_att_key is {hf.get('share_att_key')!r}; only true is supported")
    read_choice(hf, "norm_rel_ebd", ("layer_norm",), "none")
    heads = read_int(hf, "num_attention_heads")
    # Three products of heads are added.
    scale = (3 * (hidden_size // heads)) ** -0.5
    return read_bert(hf, "DebertaV2Model", EMBEDDING, min_types=0, relative=_read_distances(hf), scale=scale)


def _read_distances(hf: Mapping[str, Any]) -> RelativeSpec:
    """Read the rows of distances; numbers below 1 stand for a default, as in HF."""
    farthest = read_int(hf, "max_relative_positions", -1, minimum=-1)
    farthest = farthest if farthest > 0 else read_int(hf, "max_position_embeddings", 512)
    buckets = read_int(hf, "position_buckets", -1, minimum=-1)
    if buckets < 1:
        return RelativeSpec(num_buckets=farthest, max_distance=None)
    if not 4 <= buckets < farthest:
        raise ValueError(f"position_buckets is {buckets}, expected 4 at least, and less than {farthest} positions")
    return RelativeSpec(num_buckets=buckets, max_distance=farthest)


def _deberta_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a DeBERTa that classifies texts, or pairs of texts."""
    config = replace(_deberta_config(hf), architecture="DebertaV2ForSequenceClassification")
    act = read_choice(hf, "pooler_hidden_act", HEAD_ACTS, "gelu")
    return with_classifier(config, hf, dense="pooler.dense", act=act)


def _deberta_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a DeBERTa that classifies tokens."""
    return replace(_deberta_config(hf), architecture="DebertaV2ForTokenClassification", pooling=token_classifier(hf))


_DEBERTA = replace(
    BERT,
    config_from_hf=_deberta_config,
    names=_DEBERTA_NAMES,
    prefixes=old_and_new_norms("deberta.", ""),
    # The heads of pretraining, and positions that it did not use.
    leaves_out=("pooler.*", "cls.*", "lm_predictions.*", "mask_predictions.*", "*embeddings.position_*"),
)
FAMILIES = {
    "DebertaV2Model": _DEBERTA,
    "DebertaV2ForMaskedLM": _DEBERTA,
    "DebertaV2ForSequenceClassification": replace(_DEBERTA, config_from_hf=_deberta_classifier_config),
    "DebertaV2ForTokenClassification": replace(_DEBERTA, config_from_hf=_deberta_token_classifier_config),
}
