"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions begin after that of padding, with another classifier.

BGE-M3 is an XLM-RoBERTa with two heads for tokens, in files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import HeadLayer, ModelConfig, Pooling, TokenHead
from ..fields import read_int
from .bert import BERT, EMBEDDING, old_and_new_norms, read_bert, token_classifier, with_classifier
from .bert import DEFAULTS as BERT_DEFAULTS
from .jina_v3 import PACKED_NAMES, read_jina

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"pad_token_id": 1}
BGE_M3_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 2}


def _roberta_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a RoBERTa embedder; with rotary positions it is Jina's."""
    if hf.get("position_embedding_type") == "rotary":
        return read_jina(hf)
    return _read(hf, "RobertaModel", EMBEDDING)


def _roberta_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a RoBERTa that classifies texts, or pairs of texts."""
    config = _read(hf, "RobertaForSequenceClassification", EMBEDDING)
    return with_classifier(config, hf, dense="classifier.dense", out="classifier.out_proj")


def _roberta_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a RoBERTa that classifies tokens."""
    return _read(hf, "RobertaForTokenClassification", token_classifier(hf))


def _bge_m3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a BGE-M3: dense embeddings, vectors of tokens (ColBERT), and weights of words."""
    first, last = (read_int(BGE_M3_DEFAULTS | dict(hf), f"{side}_token_id", minimum=0) for side in ("bos", "eos"))
    colbert = HeadLayer(source="colbert_linear", size=read_int(BERT_DEFAULTS | dict(hf), "hidden_size"))
    sparse = HeadLayer(source="sparse_linear", size=1)
    heads = (
        TokenHead(task="token_embed", layers=(colbert,), activation="normalize", first_id=first),
        TokenHead(task="token_classify", layers=(sparse,), activation="relu", first_id=first, last_id=last),
    )
    tasks = ("embed", *(head.task for head in heads))
    return _read(hf, "BgeM3EmbeddingModel", Pooling(tasks=tasks, kind="CLS", token_heads=heads))


def _read(hf: Mapping[str, Any], architecture: str, pooling: Pooling) -> ModelConfig:
    hf = BERT_DEFAULTS | DEFAULTS | dict(hf)
    first, rows = read_int(hf, "pad_token_id", minimum=0) + 1, read_int(hf, "max_position_embeddings")
    if first >= rows:
        raise ValueError(f"max_position_embeddings is {rows}, and positions begin after that of padding, {first - 1}")
    return read_bert(hf | {"max_position_embeddings": rows - first}, architecture, pooling, position_offset=first)


_ROBERTA = replace(
    BERT,
    config_from_hf=_roberta_config,
    # Those of Jina's reranker v2.
    other_names=(PACKED_NAMES,),
    prefixes=old_and_new_norms("roberta.", ""),
    leaves_out=(*BERT.leaves_out, "lm_head.*", "colbert_linear.*", "sparse_linear.*"),
)
FAMILIES = {
    "BgeM3EmbeddingModel": replace(_ROBERTA, config_from_hf=_bge_m3_config),
} | {
    f"{model}{head}": family
    for model in ("Roberta", "XLMRoberta", "Camembert")
    for head, family in (
        ("Model", _ROBERTA),
        ("ForMaskedLM", _ROBERTA),
        ("ForSequenceClassification", replace(_ROBERTA, config_from_hf=_roberta_classifier_config)),
        ("ForTokenClassification", replace(_ROBERTA, config_from_hf=_roberta_token_classifier_config)),
    )
}
