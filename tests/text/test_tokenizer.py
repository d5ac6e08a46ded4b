"""An engine uses the right tokenizer, which does a few things beyond Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.support import byte_fallback, byte_level


class OneTokenizer(Checkpoint):
    """Has as much of a checkpoint as is needed."""

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


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_of_several_tokens_shows_with_its_last_one(make: Callable[[], Tokenizer]) -> None:
    tokenizer, text = make(), "a你😀好 é"
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    shown = [tokenizer.token_strings(ids[i : i + 1], ids[:i]) for i in range(len(ids))]
    assert "".join(string for (string,) in shown).lstrip() == text
    assert sum(string == "" for (string,) in shown) >= 4
    assert tokenizer.token_strings(ids[-1:], []) == [""]

    smile = tokenizer.backend.encode("😀", add_special_tokens=False).ids[-4:]
    whole = next(each for each in ids if tokenizer.token_string(each) == "a")
    assert tokenizer.token_strings([smile[3], whole, smile[0]], [whole, *smile[:3]]) == ["😀", "a", ""]


def test_a_token_keeps_the_space_that_its_word_begins_with() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode(["he "])[0]
    assert [tokenizer.backend.id_to_token(each) for each in ids] == ["▁he", "▁"]
    assert tokenizer.backend.decode(ids[:1]) == "he"
    assert tokenizer.token_strings(ids, []) == [" he", " "]


def test_nothing_to_encode(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([]) == []
    assert len(tokenizer.encode(["a", "b c"])) == 2
