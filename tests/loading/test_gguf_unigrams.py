"""GGUF files of XLM-RoBERTa, made by gguf's writer: ids, pairs, texts and states are HF's (scripts/make.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.models import Model, ModelSpecs, get_family
from tests.loading.files import gguf_bytes, gguf_f32
from tests.models.pooled import PooledGolden, run_pooled
from tests.models.running import load

FOLDER = Path(__file__).parents[1] / "data/gguf/unigrams"


@cache
def golden() -> dict[str, Any]:
    return json.loads((FOLDER / "golden.json").read_text())


def test_ids_and_texts_are_hf():
    tokenizer, expected = GGUFCheckpoint(FOLDER / "model.gguf").tokenizer(), golden()
    rows = zip(expected["texts"], expected["ids"], expected["pairs"], expected["decoded"], strict=True)
    for text, ids, pair, decoded in rows:
        assert tokenizer(text)["input_ids"] == ids, text
        assert tokenizer(text, expected["texts"][0])["input_ids"] == pair, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == decoded, text
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids[1:-1], text
    names = ("bos_token", "eos_token", "cls_token", "sep_token", "unk_token", "pad_token", "mask_token")
    assert [getattr(tokenizer, name) for name in names] == ["<s>", "</s>", "<s>", "</s>", "<unk>", "<pad>", "<mask>"]


@pytest.mark.models
def test_states_are_hf():
    checkpoint = GGUFCheckpoint(FOLDER / "model.gguf")
    config = get_family("BertModel").read_config(checkpoint.config, checkpoint.tensors)
    model = Model(ModelSpecs(config, jnp.float32))
    params = load(model, {name: checkpoint.read(name) for name in checkpoint.tensors})
    tokens = np.asarray(golden()["ids"][0], np.int32)
    text = PooledGolden(tokens, 0 * tokens, np.asarray(golden()["states"], np.float32))
    [states] = run_pooled(model, params, [text]).of_tokens
    np.testing.assert_allclose(states, text.output, rtol=0, atol=1e-4)


TOKENS = ["<s>", "</s>", "<unk>", "\u2581a", "b"]
KEYS: Mapping[str, Any] = {
    "model": "t5",
    "tokens": TOKENS,
    "scores": [0.0, 0.0, 0.0, -1.0, -2.0],
    "token_type": [3, 3, 2, 1, 1],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "unknown_token_id": 2,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.0]}, "1 scores for 5 tokens"),
        ({"scores": None}, r"no tokenizer\.ggml\.scores"),
        ({"bos_token_id": None}, "names no token for bos"),
        ({"add_bos_token": False}, "add_bos_token is false"),
    ],
)
def test_vocabularies_that_lack_a_part(tmp_path: Path, change: Mapping[str, Any], message: str):
    keys = {name: value for name, value in {**KEYS, **change}.items() if value is not None}
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8}
    metadata = {"general.architecture": "bert", "bert.attention.head_count": 1}
    metadata |= {f"bert.{name}": size for name, size in sizes.items()}
    tensors = {"token_embd.weight": np.ones((5, 8), np.float32), "token_types.weight": np.ones((1, 8), np.float32)}
    data = gguf_bytes(metadata | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}, gguf_f32(tensors))
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(VLLMValidationError, match=message):
        GGUFCheckpoint(tmp_path / "x.gguf").tokenizer()
