"""tokenizer_mode='mistral' works with a tokenizer.json, and says what is used; without one it is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jaxllm.engine.llm_engine import _load_tokenizer
from jaxllm.exceptions import VLLMValidationError
from tests.engine.support import byte_level, make_config
from tests.text.test_tokenizer import OneTokenizer


def test_mistral(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    there, empty = tmp_path / "there", tmp_path / "empty"
    empty.mkdir()
    byte_level().hf.save_pretrained(str(there))
    fields = {"checkpoint": OneTokenizer(None), "cache_dir": str(tmp_path / "cache"), "tokenizer_mode": "mistral"}
    with caplog.at_level(logging.INFO, logger="jaxllm"):
        loaded = _load_tokenizer(make_config(tokenizer=str(there), **fields))
    assert loaded is not None
    assert loaded.encode(["hello"]) == byte_level().encode(["hello"])
    assert len([record for record in caplog.records if "tokenizer.json" in record.getMessage()]) == 1
    with pytest.raises(VLLMValidationError, match=r"^tokenizer_mode='mistral' .* tokenizer\.json") as caught:
        _load_tokenizer(make_config(tokenizer=str(empty), **fields))
    assert caught.value.parameter == "tokenizer_mode"
