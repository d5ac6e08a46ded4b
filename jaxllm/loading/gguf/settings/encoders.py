"""Translate the GGUF metadata of text encoders into HF's keys."""

from __future__ import annotations

from typing import Any

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.settings.numbers import Numbers


def bert_config(file: GGUFFile, numbers: Numbers) -> dict[str, Any]:
    """Return BERT's own keys. A RoBERTa is a BERT too: the converter removes the positions that it does not use."""
    if any(name.startswith("cls.") for name in file.tensors):
        raise ValueError("it holds a classifier (cls.*), which is not supported: text encoders that embed are")
    types = file.tensors.get("token_types.weight")
    if types is None or len(types.shape) != 2:
        raise ValueError("the file has no token_types.weight of two dimensions")
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": numbers.number("attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": types.shape[0],
        "tie_word_embeddings": True,
    }
