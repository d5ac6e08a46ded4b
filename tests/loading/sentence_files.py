"""Folders of sentence-transformers, as its versions write them, made for the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.files import safetensors_bytes

MINILM: Mapping[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 384,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    },
    "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0"}},
    "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
}
"""The files of all-MiniLM-L6-v2, besides the model's."""


def modules(*kinds: str) -> list[dict[str, Any]]:
    """Return modules.json for classes by their names, "Dense"; the first one's folder is the model's."""
    rows = enumerate(kinds)
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in rows
    ]


def write_json_files(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write the files, by their paths in a folder, and return the folder."""
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    return folder


def write_dense(folder: Path, name: str, num_in: int, num_out: int, seed: int = 0, **config: Any) -> np.ndarray:
    """Write a Dense module without a bias, and return its weight [out, in]."""
    weight = np.random.default_rng(seed).standard_normal((num_out, num_in), np.float32)
    act = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": num_in, "out_features": num_out}
    write_json_files(folder, {f"{name}/config.json": {"bias": False, "activation_function": act} | sizes | config})
    (folder / name / "model.safetensors").write_bytes(safetensors_bytes({"linear.weight": weight}))
    return weight
