"""BERT and models of its shape, such as MiniLM, E5, BGE and GTE: an encoder that norms its stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import HeadLayer, ModelConfig, Pooling
from ..family import Family
from ..fields import read_float, read_int, require
from ..layers import EncoderFrame, GPTLayer
from ..names import Prefixes, TensorName, plain_mlp_names
from ..pooling import EMBED, TOKEN_CLASSIFY, as_multi_vector, read_num_labels
from ..reading import read_decoder
from .opt import own_heads

_LAYER, _ATTENTION = "{body}encoder.layer.{l}", "{body}encoder.layer.{l}.attention"
_BERT_NAMES = MappingProxyType(
    {
        "embed.table": TensorName("{body}embeddings.word_embeddings.weight", "v d -> v d"),
        "positions": TensorName("{body}embeddings.position_embeddings.weight", "p d -> p d"),
        "types": TensorName("{body}embeddings.token_type_embeddings.weight", "y d -> y d"),
        "embed_norm.scale": TensorName("{body}embeddings.LayerNorm.{scale}", "d -> d"),
        "embed_norm.bias": TensorName("{body}embeddings.LayerNorm.{shift}", "d -> d"),
        "layers.attn.q": TensorName(f"{_ATTENTION}.self.query.weight", "(n h) d -> n h d"),
        "layers.attn.k": TensorName(f"{_ATTENTION}.self.key.weight", "(k h) d -> k h d"),
        "layers.attn.v": TensorName(f"{_ATTENTION}.self.value.weight", "(k h) d -> k h d"),
        "layers.attn.q_bias": TensorName(f"{_ATTENTION}.self.query.bias", "(n h) -> n h"),
        "layers.attn.k_bias": TensorName(f"{_ATTENTION}.self.key.bias", "(k h) -> k h"),
        "layers.attn.v_bias": TensorName(f"{_ATTENTION}.self.value.bias", "(k h) -> k h"),
        "layers.attn.o": TensorName(f"{_ATTENTION}.output.dense.weight", "d c -> d c"),
        "layers.attn.o_bias": TensorName(f"{_ATTENTION}.output.dense.bias", "d -> d"),
        "layers.attn_norm.scale": TensorName(f"{_ATTENTION}.output.LayerNorm.{{scale}}", "d -> d"),
        "layers.attn_norm.bias": TensorName(f"{_ATTENTION}.output.LayerNorm.{{shift}}", "d -> d"),
        **plain_mlp_names(f"{_LAYER}.intermediate.dense", f"{_LAYER}.output.dense"),
        "layers.mlp_norm.scale": TensorName(f"{_LAYER}.output.LayerNorm.{{scale}}", "d -> d"),
        "layers.mlp_norm.bias": TensorName(f"{_LAYER}.output.LayerNorm.{{shift}}", "d -> d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}

EMBEDDING = Pooling(tasks=EMBED, kind="CLS")


def read_bert(
    hf: Mapping[str, Any],
    architecture: str,
    pooling: Pooling,
    *,
    positions: str = "absolute",
    min_types: int = 1,
    **family: Any,
) -> ModelConfig:
    """Read the fields that all models of BERT's shape share; `family` is that of `read_decoder`.

    `positions` is what `position_embedding_type` must be, and `min_types` the least number of token types.
    """
    hf = DEFAULTS | dict(hf)
    require(hf, position_embedding_type=positions, is_decoder=False, add_cross_attention=False)
    hf |= own_heads(read_int(hf, "hidden_size"), read_int(hf, "num_attention_heads"))
    fields: dict[str, Any] = {
        "norm_eps": read_float(hf, "layer_norm_eps"),
        "num_token_types": read_int(hf, "type_vocab_size", minimum=min_types),
        "tie_word_embeddings": True,
        "final_norm": False,
        "ropes": (),
        "rope": None,
        "causal": False,
        "norms_stream": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    }
    return read_decoder(hf, architecture=architecture, pooling=pooling, **(fields | family))


def with_classifier(
    config: ModelConfig,
    hf: Mapping[str, Any],
    *,
    dense: str = "{body}pooler.dense",
    out: str = "classifier",
    act: str = "tanh",
) -> ModelConfig:
    """Return an embedder's config with the head of HF's `*ForSequenceClassification` models: two layers, by name."""
    head = (
        HeadLayer(source=dense, size=config.hidden_size, act=act),
        HeadLayer(source=out, size=read_num_labels(hf)),
    )
    return replace(config, pooling=Pooling(tasks=("classify",), kind="CLS", head=head))


def token_classifier(hf: Mapping[str, Any]) -> Pooling:
    """Return the pooling of HF's `*ForTokenClassification` models of this shape."""
    head = HeadLayer(source="classifier", size=read_num_labels(hf))
    return Pooling(tasks=TOKEN_CLASSIFY, kind="CLS", head=(head,))


def _bert_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a BERT that embeds."""
    return read_bert(hf, "BertModel", EMBEDDING)


def _bert_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a BERT that classifies texts, or pairs of texts."""
    return with_classifier(read_bert(hf, "BertForSequenceClassification", EMBEDDING), hf)


def _bert_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a BERT that classifies tokens."""
    return read_bert(hf, "BertForTokenClassification", token_classifier(hf))


def old_and_new_norms(*bodies: str) -> tuple[Prefixes, ...]:
    """Return the prefixes of checkpoints with HF's names of LayerNorms, and with TensorFlow's.

    The first checkpoints have TensorFlow's names, and those that transformers 5.3 wrote of models it had read.
    """
    return tuple(Prefixes(body, "", *ends) for ends in ((), ("gamma", "beta")) for body in bodies)


BERT = Family(
    config_from_hf=_bert_config,
    names=_BERT_NAMES,
    layer=GPTLayer,
    frame=EncoderFrame,
    prefixes=old_and_new_norms("bert.", ""),
    # The heads of pretraining, and buffers that older versions of HF saved.
    leaves_out=("*pooler.dense.*", "cls.*", "*embeddings.position_ids", "*embeddings.token_type_ids"),
)
FAMILIES = {
    "BertModel": BERT,
    "BertForMaskedLM": BERT,
    "HF_ColBERT": as_multi_vector(BERT, "linear"),
    "BertForSequenceClassification": replace(BERT, config_from_hf=_bert_classifier_config),
    "BertForTokenClassification": replace(BERT, config_from_hf=_bert_token_classifier_config),
}
