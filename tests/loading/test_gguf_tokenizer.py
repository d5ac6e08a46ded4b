"""Tokenizers built from GGUF metadata: splitting by kind, special tokens, beginnings and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata
from tests.loading.test_gguf_config import EMBED

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
BYTE_LEVEL = {
    "<s>": CONTROL,
    "</s>": CONTROL,
    "<think>": USER_DEFINED,
    **dict.fromkeys(["a", "b", "1", "2", "\u0120", "\u0120\u0120", "12", "\u01201", "ab", "\u0120a"], NORMAL),
}
MERGES = ["1 2", "\u0120 1", "a b", "\u0120 \u0120", "\u0120 a"]


def build(folder: Path, tokens: dict[str, int], **more: Any) -> Any:
    keys = {"tokens": list(tokens), "token_type": list(tokens.values())} | more
    named = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = folder / "x.gguf"
    path.write_bytes(gguf_bytes(llama_metadata() | named, gguf_f32(EMBED)))
    return GGUFCheckpoint(path).tokenizer()


def byte_level(folder: Path, **more: Any) -> Any:
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    return build(folder, BYTE_LEVEL, **({"model": "gpt2", "merges": MERGES} | ids | more))


def spelled(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "\u0120", "\u0120", "12"]),
        ("smollm", ["a", "\u0120\u0120", "1", "2"]),
        ("qwen2", ["a", "\u0120", "\u0120", "1", "2"]),
        ("llama-bpe", ["<s>", "a", "\u0120", "\u0120", "12"]),
    ],
)
def test_the_pre_tokenizer_decides_on_digits(tmp_path: Path, pre: str, expected: list[str]):
    assert spelled(byte_level(tmp_path, pre=pre), "a  12") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        *(
            (
                pre,
                ["Hello", "World", " don'T", " we'll", " a", "/b", " ", "123", "45", " ", " x", "\n", "//\n", " ABCs"],
            )
            for pre in ("gpt-4o", "llama4")
        ),
        (
            "glm4",
            ["HelloWorld", " don", "'T", " we", "'ll", " a", "/b", " ", "123", "45", " ", " x", "\n", "//\n", " ABCs"],
        ),
    ],
)
def test_words(tmp_path: Path, pre: str, expected: list[str]):
    """Words are those that the `regex` library finds with the patterns of the models' own tokenizers."""
    splitting = byte_level(tmp_path, pre=pre).backend_tokenizer.pre_tokenizer
    words = [word for word, _ in splitting.pre_tokenize_str("HelloWorld don'T we'll a/b 12345  x\n//\n ABCs")]
    assert words == [word.replace(" ", "\u0120").replace("\n", "\u010a") for word in expected]


def test_special_tokens(tmp_path: Path):
    tokenizer = byte_level(tmp_path)
    assert spelled(tokenizer, "a<think>b</s>") == ["a", "<think>", "b", "</s>"]
    assert tokenizer.decode([3, 2, 4, 1], skip_special_tokens=True) == "a<think>b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_beginning_and_end_are_added_if_the_file_says_so(tmp_path: Path):
    both = byte_level(tmp_path, add_bos_token=True, add_eos_token=True)
    assert spelled(both, "ab") == ["<s>", "ab", "</s>"]
    assert both("ab", add_special_tokens=False)["input_ids"] == [11]
    neither = byte_level(tmp_path, pre="llama-bpe", add_bos_token=False)
    assert spelled(neither, "ab") == ["ab"]


def sentencepiece(folder: Path, **more: Any) -> Any:
    tokens = {"<unk>": CONTROL, "<s>": CONTROL, "</s>": CONTROL, "<0x0A>": BYTE, "<0xC3>": BYTE, "<0xA9>": BYTE}
    tokens |= dict.fromkeys(["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab"], NORMAL)
    scores = [0.0] * 6 + [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return build(folder, tokens, **({"model": "llama", "scores": scores} | ids | more))


def test_sentencepiece(tmp_path: Path):
    tokenizer = sentencepiece(tmp_path)
    assert spelled(tokenizer, "ab a") == ["<s>", "\u2581ab", "\u2581a"]
    assert spelled(tokenizer, "a\n\u00e9") == ["<s>", "\u2581a", "<0x0A>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer("ab a\u00e9")["input_ids"], skip_special_tokens=True) == "ab a\u00e9"


@pytest.mark.parametrize(
    ("merges", "expected"),
    [
        (["\u2581 a", "a b", "\u2581a b"], ["\u2581ab", "b", "\u2581a"]),
        (["a b", "\u2581 a"], ["\u2581", "ab", "b", "\u2581a"]),
    ],
)
def test_gemma_4_has_merges_of_its_own(tmp_path: Path, merges: list[str], expected: list[str]):
    """A file of Gemma 4 that says that texts have no beginning is wrong: llama.cpp adds one nevertheless."""
    tokenizer = sentencepiece(
        tmp_path, model="gemma4", merges=merges, add_space_prefix=False, add_bos_token=False, scores=[0.0]
    )
    assert spelled(tokenizer, " abb a") == ["<s>", *expected]
    with pytest.raises(VLLMValidationError, match=r"no tokenizer\.ggml\.merges"):
        sentencepiece(tmp_path, model="gemma4")


def test_chat_tokens_of_phi_3_take_the_white_space_after_them(tmp_path: Path):
    """HF's tokenizer and llama.cpp leave it out; files do not hold this, so the model's name decides."""
    phi, other = (sentencepiece(tmp_path, **{"general.name": name}) for name in ("Phi-3-mini", "Llama"))
    assert spelled(phi, "a</s>\n b") == ["<s>", "\u2581a", "</s>", "\u2581", "b"]
    assert spelled(other, "a</s>\n b") == ["<s>", "\u2581a", "</s>", "\u2581", "<0x0A>", "\u2581", "b"]
    assert spelled(phi, "<s> a") == ["<s>", "<s>", "\u2581", "\u2581a"]


def test_sentencepiece_without_prefix_space(tmp_path: Path):
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert spelled(tokenizer, "ab a") == ["ab", "\u2581a"]
    assert tokenizer.decode([9, 10]) == "ab a"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"pre": "unheard-of"}, "'unheard-of' is not supported; supported: default, gpt-2"),
        ({"merges": ["a b c"]}, "'a b c' is not two tokens"),
        ({"merges": ["a x"]}, "cannot be used"),
        ({"token_type": [1]}, "1 token types for 13 tokens"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, more: dict[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message) as error:
        byte_level(tmp_path, **more)
    assert error.value.parameter == "tokenizer"
    assert "skip_tokenizer_init" in str(error.value)


def test_a_file_without_tokenizer_says_so(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(llama_metadata(), gguf_f32(EMBED)))
    checkpoint = GGUFCheckpoint(tmp_path / "x.gguf")
    with pytest.raises(VLLMValidationError, match="describes no tokenizer"):
        checkpoint.tokenizer()
