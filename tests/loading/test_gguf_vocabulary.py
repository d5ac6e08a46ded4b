"""Words by pre-tokenizer, and the tokens that end texts, are llama.cpp's (scripts/make.py gguf_vocabulary_goldens)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.gguf.text_splitting import SPLITTINGS
from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata


@cache
def goldens() -> dict[str, Any]:
    return json.loads((Path(__file__).parents[1] / "data/gguf/vocabulary.json").read_text())


GROUPS = list(goldens()["words"])
WITHOUT_BYTES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
"""These names of llama.cpp's are of byte-level files without a byte-level alphabet."""


def open_vocabulary(folder: Path, tokens: list[str], types: list[int], merges: list[str], **keys: Any) -> Any:
    values = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges} | keys
    metadata = llama_metadata() | {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    path = folder / "x.gguf"
    path.write_bytes(gguf_bytes(metadata, gguf_f32({"token_embd.weight": np.ones((len(tokens), 8))})))
    return GGUFCheckpoint(path)


def test_every_name_has_a_golden():
    assert {name for names in GROUPS for name in names.split()} == set(SPLITTINGS)


@pytest.mark.parametrize("names", GROUPS)
def test_words_are_llama_cpps(tmp_path: Path, names: str):
    tokens, merges, expected = goldens()["tokens"], goldens()["merges"], goldens()["words"][names]
    texts = goldens()["texts"][: len(expected["ids"])]
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    for name in names.split():
        types = [1] * len(tokens)
        hf = open_vocabulary(tmp_path, tokens, types, merges, pre=name, **ids).tokenizer()
        begin = [0] if expected["adds_bos"] else []
        hf.backend_tokenizer.normalizer = None  # some models compose characters, which llama.cpp does not
        for text, token_ids in zip(texts, expected["ids"], strict=True):
            assert hf(text)["input_ids"] == begin + token_ids, (name, text)


@pytest.mark.parametrize("name", WITHOUT_BYTES)
def test_other_names_are_refused(tmp_path: Path, name: str):
    checkpoint = open_vocabulary(tmp_path, ["a", "b", "ab"], [1, 1, 1], ["a b"], pre=name)
    with pytest.raises(VLLMValidationError, match=f"pre-tokenizer '{name}' is not supported.*tokenizer=") as error:
        checkpoint.tokenizer()
    assert error.value.parameter == "tokenizer"


@pytest.mark.parametrize("case", goldens()["ends"], ids=str)
def test_ends_are_llama_cpps(tmp_path: Path, case: dict[str, Any]):
    keys = {key: value for key, value in case.items() if key not in ("tokens", "ends")}
    tokens = case["tokens"] | {"a": 1, "b": 1, "ab": 1}
    checkpoint = open_vocabulary(tmp_path, list(tokens), list(tokens.values()), ["a b"], pre="gpt-2", **keys)
    ids = checkpoint.generation_config["eos_token_id"]
    assert sorted(ids if isinstance(ids, list) else [ids]) == case["ends"]
