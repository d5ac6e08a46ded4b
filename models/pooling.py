"""Decoders that pool: make an embedding model or a classifier of a family of decoders, or of a decoder's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import HeadLayer, ModelConfig, Pooling
from .family import Family
from .fields import read_bool, read_choice, read_int, read_ints, read_mapping

EMBED = ("embed", "token_embed")
_TOKEN_EMBED = ("token_embed",)
_CLASSIFY = ("classify", "token_classify")
TOKEN_CLASSIFY = ("token_classify",)
_COLBERT_DIMS = ("colbert_dim", "dim", "projection_dim")
"""The keys of config.json that may have the size of a ColBERT model's vectors."""
METHODS = ("from_2_way_softmax", "no_post_processing")
"""The ways to make scores of an output head's logits: their difference, or the logits themselves."""


def as_embedder(decoder: Family) -> Family:
    """Return the family of embedding models around a decoder, HF's `*Model`."""
    return replace(decoder, config_from_hf=lambda hf: embedding(decoder.config_from_hf(hf)))


def as_classifier(decoder: Family) -> Family:
    """Return the family of classifiers of texts around a decoder, HF's `*ForSequenceClassification`."""
    return replace(decoder, config_from_hf=lambda hf: classification(decoder.config_from_hf(hf), hf, decoder))


def as_token_classifier(decoder: Family) -> Family:
    """Return the family of classifiers of tokens around a decoder, HF's `*ForTokenClassification`."""
    return replace(decoder, config_from_hf=lambda hf: token_classification(decoder.config_from_hf(hf), hf))


def as_multi_vector(embedder: Family, source: str | None = None) -> Family:
    """Return the family of ColBERT models around one of embedding models, which make a vector of every token.

    `source` is the module that projects the tokens' states, to `dim` numbers of its settings or config.json; with None
    the modules of sentence-transformers do.
    """

    def read(hf: Mapping[str, Any]) -> ModelConfig:
        config = embedder.config_from_hf(hf)
        named = next((hf[key] for key in _COLBERT_DIMS if hf.get(key) is not None), 128)
        size = read_int(read_mapping(hf, "colbert_metadata"), "dim", named)
        head = () if source is None else (HeadLayer(source=source, size=size, bias=False),)
        assert config.pooling is not None
        return replace(config, pooling=replace(config.pooling, tasks=_TOKEN_EMBED, head=head))

    return replace(embedder, config_from_hf=read)


def embedding(config: ModelConfig, kind: str = "LAST") -> ModelConfig:
    """Return a decoder's config with hidden states as outputs; see `Pooling.kind`."""
    return pooled(config, Pooling(tasks=EMBED, kind=kind))


def classification(config: ModelConfig, hf: Mapping[str, Any], family: Family) -> ModelConfig:
    """Return a decoder's config with a score for each class, from the last token's hidden state.

    If the config.json has `classifier_from_token`, a list of tokens, scores are those tokens' logits or, depending on
    `method`, the second one's minus the first one's. Raises ValueError, with the key, for values that do not fit.
    """
    if hf.get("classifier_from_token") is None:
        head = HeadLayer(source="score", size=read_num_labels(hf), bias=False)
        return pooled(config, Pooling(tasks=_CLASSIFY, kind="LAST", head=(head,)))
    ids, method = read_ints(hf, "classifier_from_token"), read_choice(hf, "method", METHODS, METHODS[0])
    is_difference = method == METHODS[0]
    if len(set(ids)) != len(ids) or not (2 if is_difference else 1) <= len(ids) <= 2 or max(ids) >= config.vocab_size:
        raise ValueError(f"classifier_from_token is {list(ids)}, expected two tokens of {config.vocab_size}")
    if config.head_bias:
        raise ValueError("classifier_from_token is not supported in a model whose output head has a bias")
    path = "embed.table" if config.tie_word_embeddings else "lm_head.table"
    source = family.names[path].name.removesuffix(".weight")
    head = HeadLayer(source=source, size=len(ids), bias=False, rows=ids)
    return pooled(config, Pooling(tasks=_CLASSIFY, kind="LAST", head=(head,), is_difference=is_difference))


def token_classification(config: ModelConfig, hf: Mapping[str, Any], source: str = "score") -> ModelConfig:
    """Return a decoder's config with a score for each class and token."""
    bias = read_bool(hf, "token_classification_bias", True)
    head = HeadLayer(source=source, size=read_num_labels(hf), bias=bias)
    return pooled(config, Pooling(tasks=TOKEN_CLASSIFY, kind="LAST", head=(head,)))


def pooled(config: ModelConfig, pooling: Pooling) -> ModelConfig:
    """Return a decoder's config with a head in place of its output head."""
    if config.embed_size is not None:
        raise ValueError(f"word_embed_proj_dim is {config.embed_size}, which is not supported in a model that pools")
    # Tied to the embedding, the output head is not loaded: nothing reads its logits.
    return replace(config, pooling=pooling, tie_word_embeddings=True)


def read_num_labels(hf: Mapping[str, Any]) -> int:
    """Return the number of a classifier's classes: of `id2label`, or else `num_labels`, by default 2."""
    names = read_mapping(hf, "id2label")
    num_labels = read_int(hf, "num_labels", len(names) or 2)
    if names and num_labels != len(names):
        raise ValueError(f"num_labels is {num_labels}, but id2label names {len(names)}")
    return num_labels
