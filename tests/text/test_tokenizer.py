"""Which tokenizer an engine uses, and what it does beyond Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.support import byte_level


class OneTokenizer(Checkpoint):
    """As much of a checkpoint as is needed."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    def read(self, name: str) -> Any:
        raise NotImplementedError(name)

    def tokenizer(self) -> Any:
        return self._hf

    def tokenizer_digest(self) -> str:
        return "its files"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


def test_the_checkpoints_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = load_tokenizer(OneTokenizer(tokenizer.hf), str(tmp_path))
    assert loaded.hf is tokenizer.hf


def test_another_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.hf.save_pretrained(str(tmp_path))
    checkpoint, cache = OneTokenizer(None), str(tmp_path / "cache")
    loaded = load_tokenizer(checkpoint, cache, name=str(tmp_path))
    assert loaded.encode(["hello world"]) == tokenizer.encode(["hello world"])
    assert loaded.hf.chat_template == tokenizer.hf.chat_template
    (tmp_path / "empty").mkdir()
    with pytest.raises(VLLMValidationError, match="cannot be loaded") as error:
        load_tokenizer(checkpoint, cache, name=str(tmp_path / "empty"))
    assert error.value.parameter == "tokenizer"


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        pass

    with pytest.raises(VLLMValidationError, match="Slow is not a fast tokenizer"):
        Tokenizer.of(Slow())  # type: ignore[arg-type]


def test_token_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode("hello\u00e9").ids
    assert tokenizer.token_string(ids[0]) == tokenizer.token_string(ids[0]) == "hello"
    assert tokenizer.token_string(0) == "<|end|>"
    assert tokenizer.token_string(tokenizer.backend.encode("🎉").ids[0]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.token_string(5000) == ""


def test_nothing_to_encode(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([]) == []
    assert len(tokenizer.encode(["a", "b c"])) == 2
