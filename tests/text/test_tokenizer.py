"""An engine uses the right tokenizer, which does a few things beyond Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.text.tokenizer import EncodeOptions, Tokenizer, load_tokenizer
from jaxllm.text.tokenizer_parts import TokenizerParts
from tests.engine.support import byte_fallback, byte_level


class OneTokenizer(Checkpoint):
    """Has as much of a checkpoint as is needed."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    def read(self, name: str, index: int | None = None) -> Any:
        raise NotImplementedError(name)

    def tokenizer(self) -> Any:
        return self._hf

    def tokenizer_digest(self) -> str:
        return "its files"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("gap", [" " * 3000, " " + "x" * 3000 + " ", " x" * 3])
def test_what_is_cut_reaches_over_white_space_and_unknown_words(
    side: Literal["left", "right"], gap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "cc": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words = Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend))
    text = f"a b cc{gap}cc b a"
    [whole] = words.encode([text])
    for keep in (1, 3, 5, 6, 7, 20):
        part = words.reach(text, keep, side)
        expected = whole[-keep:] if side == "left" else whole[:keep]
        assert words.encode([part], keep=keep, side=side) == [expected]
    assert words.longest_token == len("[UNK]")
    monkeypatch.setattr("jaxllm.text.tokenizer.MAX_REACH", 64)
    assert len(words.reach(" " * 3000, 3, side)) == 40


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


POST_PROCESSORS = {
    "none": None,
    "byte level": processors.ByteLevel(trim_offsets=True),
    "begin": processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)]),
    "both ends": processors.TemplateProcessing(single="<s> $A <|end|>", special_tokens=[("<s>", 3), ("<|end|>", 0)]),
    "roberta": processors.RobertaProcessing(("<|end|>", 0), ("<s>", 3)),
    "bert": processors.BertProcessing(("<|end|>", 0), ("<s>", 3)),
    "sequence": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)]),
        ]
    ),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_truncation_is_transformers(name: str, side: str) -> None:
    hf: Any = byte_level().hf
    hf.truncation_side = side
    if POST_PROCESSORS[name] is not None:
        hf.backend_tokenizer.post_processor = POST_PROCESSORS[name]
    texts = ["", "a", "hello", "one two three four", "<s> hello <|im_end|>", "你好 " * 9]
    tokenizer = Tokenizer.of(hf)
    for add_special_tokens in (True, False):
        for keep in range(2 if add_special_tokens else 1, 12):
            settings: dict[str, Any] = {"add_special_tokens": add_special_tokens}
            expected = hf(texts, truncation=True, max_length=keep, **settings)["input_ids"]
            assert tokenizer.encode(texts, keep=keep, **settings) == expected
            assert max(map(len, expected)) == keep


def test_the_side_of_a_cut(tokenizer: Tokenizer) -> None:
    left = Tokenizer(msgspec.structs.replace(tokenizer.parts, truncation_side="left"), tokenizer._load_hf)
    for text, cutter, kept in [
        (None, tokenizer, [1, 2]),
        (None, None, [1, 2]),
        (None, left, [2, 3]),
        ("right", left, [1, 2]),
        ("left", tokenizer, [2, 3]),
    ]:
        assert EncodeOptions(keep=2, side=text).cut([1, 2, 3], cutter) == kept
        assert EncodeOptions(keep=3, side=text).cut([1, 2, 3], cutter) == [1, 2, 3]


def test_parts_are_data(tokenizer: Tokenizer) -> None:
    sent = msgspec.msgpack.encode(tokenizer.parts)
    received = Tokenizer(msgspec.msgpack.decode(sent, type=TokenizerParts), tokenizer._load_hf)
    assert received.parts == tokenizer.parts
    assert received.encode(["hello <|im_end|>"]) == tokenizer.encode(["hello <|im_end|>"])


def test_nothing_to_encode(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([]) == []
    assert len(tokenizer.encode(["a", "b c"])) == 2
