"""tokenizer_mode='mistral' works with a tokenizer.json, and says what is used; without one it is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jaxllm.engine.core.engine_tokenizer import load_engine_tokenizer
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import byte_level
from tests.text.test_tokenizer import OneTokenizer


def test_mistral(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    saved, empty = tmp_path / "there", tmp_path / "empty"
    empty.mkdir()
    byte_level().hf.save_pretrained(str(saved))

    def load(folder: Path) -> Tokenizer | None:
        args = EngineArgs(model="any", tokenizer=str(folder), tokenizer_mode="mistral")
        return load_engine_tokenizer(args, OneTokenizer(None), str(tmp_path / "cache"))

    with caplog.at_level(logging.INFO, logger="jaxllm"):
        loaded = load(saved)
    assert loaded is not None
    assert loaded.encode(["hello"]) == byte_level().encode(["hello"])
    assert len([record for record in caplog.records if "tokenizer.json" in record.getMessage()]) == 1
    with pytest.raises(VLLMValidationError, match=r"^tokenizer_mode='mistral' .* tokenizer\.json") as caught:
        load(empty)
    assert caught.value.parameter == "tokenizer_mode"
