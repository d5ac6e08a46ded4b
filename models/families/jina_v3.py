"""Jina Embeddings v3 and Jina ColBERT v2: XLM-RoBERTa with rotary positions, and with adapters for tasks in v3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig, Pooling, TaskAdapters
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..layers import EncoderFrame, GPTLayer
from ..names import Prefixes, TensorName, plain_mlp_names
from ..pooling import EMBED, as_multi_vector
from ..reading import read_rope, read_rope_settings
from .bert import read_bert, token_classifier, with_classifier
from .gte import ROTARY_NAMES, packed_names

_OLD = "{body}encoder.layers.{l}"
PACKED_NAMES = {
    **packed_names(_OLD, "mixer.Wqkv", "mixer.out_proj", ("norm1", "norm2"), is_biased=True),
    **plain_mlp_names(f"{_OLD}.mlp.fc1", f"{_OLD}.mlp.fc2"),
    "embed_norm.scale": TensorName("{body}emb_ln.weight", "d -> d"),
    "embed_norm.bias": TensorName("{body}emb_ln.bias", "d -> d"),
}
"""The names of Jina's own checkpoints, besides those of embeddings."""


def _beside_adapters(names: Mapping[str, TensorName]) -> dict[str, TensorName]:
    """Return the names that matrices have in a checkpoint with the adapters of tasks."""
    end = ".weight"
    return {
        path: name._replace(name=name.name.removesuffix(end) + ".parametrizations.weight.original")
        if name.name.endswith(end) and "norm" not in path
        else name
        for path, name in names.items()
    }


# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 250_002,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "rope_theta": 20_000.0,
}


def read_jina(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Jina Embeddings v3, with Jina's own keys or with HF's."""
    base = {} if hf.get("rotary_emb_base") is None else {"rope_theta": hf["rotary_emb_base"]}
    hf = DEFAULTS | base | dict(hf)
    require(hf, use_rms_norm=False, mlp_type="mlp")
    rope = read_rope(hf, read_rope_settings(hf))
    pooling, adapters = Pooling(tasks=EMBED, kind="MEAN"), _read_adapters(hf)
    fields: dict[str, Any] = {"ropes": (rope,), "rope": 0, "task_adapters": adapters}
    return read_bert(hf, "JinaEmbeddingsV3Model", pooling, positions="rotary", **fields)


def _read_adapters(hf: Mapping[str, Any]) -> TaskAdapters | None:
    """Return the adapters that the checkpoint has; None if it has none."""
    names = hf.get("lora_adaptations")
    if names is None or not read_bool(hf, "load_trained_adapters"):
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"lora_adaptations is {names!r}, expected the names of tasks")
    rank = read_int(hf, "lora_rank", 4)
    return TaskAdapters(tuple(names), rank, read_float(hf, "lora_alpha", 1.0) / rank)


def _jina_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a model of this shape that classifies texts, or pairs of texts."""
    config = replace(read_jina(hf), architecture="JinaEmbeddingsV3ForSequenceClassification", task_adapters=None)
    return with_classifier(config, hf, dense="classifier.dense", out="classifier.out_proj")


def _jina_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a model of this shape that classifies tokens."""
    pooling = token_classifier(hf)
    fields: dict[str, Any] = {"pooling": pooling, "task_adapters": None}
    return replace(read_jina(hf), architecture="JinaEmbeddingsV3ForTokenClassification", **fields)


_EMBEDDINGS = {path: ROTARY_NAMES[path] for path in ("embed.table", "types")}
_JINA = Family(
    config_from_hf=read_jina,
    names={**ROTARY_NAMES, **plain_mlp_names("{body}layers.{l}.mlp.fc1", "{body}layers.{l}.mlp.fc2")},
    other_names=(_beside_adapters({**_EMBEDDINGS, **PACKED_NAMES}), PACKED_NAMES),
    layer=GPTLayer,
    frame=EncoderFrame,
    prefixes=(Prefixes("roberta.", ""), Prefixes("", "")),
    marks=("embed.table",),
    leaves_out=("*pooler.dense.*", "lm_head.*", "*.parametrizations.weight.0.lora_*"),
)
FAMILIES = {
    "JinaEmbeddingsV3Model": _JINA,
    "JinaEmbeddingsV3ForMaskedLM": _JINA,
    "ColBERTJinaRobertaModel": as_multi_vector(_JINA, "linear"),
    "JinaEmbeddingsV3ForSequenceClassification": replace(_JINA, config_from_hf=_jina_classifier_config),
    "JinaEmbeddingsV3ForTokenClassification": replace(_JINA, config_from_hf=_jina_token_classifier_config),
}
