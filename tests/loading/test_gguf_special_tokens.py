"""Which tokens end a text of a GGUF file: as llama.cpp decides by keys, defaults and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
LETTERS = ["a", "b", "\u0120", "ab"]


def open_gguf(folder: Path, tokens: list[str], types: dict[str, int] | None = None, **keys: Any) -> GGUFCheckpoint:
    """Open a byte-level file of these tokens; those whose types are not given are control tokens, letters are not."""
    kinds = types or {}
    default = [NORMAL if token in LETTERS else CONTROL for token in tokens]
    stored = [kinds.get(token, kind) for token, kind in zip(tokens, default, strict=True)]
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": stored, "merges": ["a b"]} | keys
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    path = folder / "x.gguf"
    embedding = {"token_embd.weight": np.ones((len(tokens) + 2, 8))}
    path.write_bytes(gguf_bytes(llama_metadata() | metadata, gguf_f32(embedding)))
    return GGUFCheckpoint(path)


def ends(checkpoint: GGUFCheckpoint) -> list[int]:
    ids = checkpoint.generation_config.get("eos_token_id", [])
    return [ids] if isinstance(ids, int) else ids


HARMONY = ["<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|channel|>", *LETTERS]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"eos_token_id": 1}, [1, 0, 2]),
        ({"eos_token_id": 0, "eos_token_ids": [0, 1, 2]}, [0, 1, 2]),
        ({"eos_token_id": 1, "eot_token_id": 3}, [1, 0, 2]),
        # A converter that took the message's end for the text's.
        ({"eos_token_id": 3}, [0, 1, 2]),
    ],
)
def test_a_message_of_gpt_oss_does_not_end_the_answer(tmp_path: Path, keys: dict[str, Any], expected: list[int]):
    checkpoint = open_gguf(tmp_path, HARMONY, **keys)
    assert ends(checkpoint) == expected
    assert checkpoint.tokenizer().eos_token_id == expected[0]


def test_a_message_of_solar_does_not_end_the_answer(tmp_path: Path):
    tokens = ["<|endoftext|>", "<|flush|>", "<|calls|>", "<|end|>", *LETTERS]
    assert ends(open_gguf(tmp_path, tokens, eos_token_id=0)) == [0, 1, 2]


def test_elsewhere_a_message_ends_the_answer(tmp_path: Path):
    """Phi-3 has <|end|> alone."""
    tokens = ["<|endoftext|>", "<|end|>", *LETTERS]
    assert ends(open_gguf(tmp_path, tokens, eos_token_id=0)) == [0, 1]


@pytest.mark.parametrize(
    "name",
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ],
)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, None])
def test_names_end_a_text_whatever_their_type(tmp_path: Path, name: str, kind: int | None):
    """Older files have the ends of turns as plain tokens, and some have no types."""
    more: dict[str, Any] = {"token_type": None} if kind is None else {}
    types = {name: NORMAL if kind is None else kind}
    checkpoint = open_gguf(tmp_path, ["<|endoftext|>", *LETTERS, name], types, eos_token_id=0, **more)
    assert ends(checkpoint) == [0, 5]
    tokenizer = checkpoint.tokenizer()
    assert tokenizer(f"ab{name}a")["input_ids"] == [4, 5, 1]
    assert tokenizer.decode([4, 5, 1], skip_special_tokens=True) == "aba"


@pytest.mark.parametrize("name", ["<|fim_prefix|>", "<|code_suffix|>", "<\uff5cfim\u2581hole\uff5c>", "<|channel|>"])
@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
def test_marks_are_read_whole_and_end_nothing(tmp_path: Path, name: str, kind: int):
    checkpoint = open_gguf(tmp_path, ["<|endoftext|>", *LETTERS, name], {name: kind}, eos_token_id=0)
    assert ends(checkpoint) == [0]
    tokenizer = checkpoint.tokenizer()
    assert tokenizer(f"ab{name}a")["input_ids"] == [4, 5, 1]
    assert tokenizer.decode([4, 5, 1], skip_special_tokens=True) == ("aba" if kind == NORMAL else f"ab{name}a")


@pytest.mark.parametrize(
    "key", ["eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"]
)
def test_keys_end_a_text(tmp_path: Path, key: str):
    keys: dict[str, Any] = {"eos_token_id": 0, key: 1}
    checkpoint = open_gguf(tmp_path, ["<x>", "<y>", *LETTERS], **keys)
    assert ends(checkpoint) == [0, 1]


def test_ids_that_are_no_tokens_count_as_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tokens = ["<x>", "<|im_end|>", *LETTERS]
    odd: dict[str, Any] = {"bos_token_id": 2**32 - 1, "eos_token_id": 99, "padding_token_id": -1, "eot_token_id": 77}
    checkpoint = open_gguf(tmp_path, tokens, **odd, eos_token_ids=[0, 99, -1])
    assert checkpoint.generation_config == {"eos_token_id": [0, 1]}
    tokenizer = checkpoint.tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, None, None)
    assert tokenizer("ab")["input_ids"] == [5]
    assert "tokenizer.ggml.eos_token_id is 99, but there are 6 tokens" in caplog.text


@pytest.mark.parametrize("metadata", [{}, {"bos_token_id": 99, "eos_token_id": 99, "unknown_token_id": 99}])
def test_sentencepiece_has_ids_by_default(tmp_path: Path, metadata: dict[str, Any]):
    tokens = ["<unk>", "<s>", "</s>", "a", "\u2581"]
    types = {"a": NORMAL, "\u2581": NORMAL}
    checkpoint = open_gguf(tmp_path, tokens, types, model="llama", scores=[0.0] * 5, merges=None, **metadata)
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = checkpoint.tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer("a")["input_ids"] == [1, 4, 3]


def test_markup_does_not_end_a_text(tmp_path: Path):
    """Gemma's vocabularies have </s> for HTML."""
    tokens = ["<eos>", "</s>", *LETTERS]
    assert ends(open_gguf(tmp_path, tokens, {"</s>": USER_DEFINED}, eos_token_id=0)) == [0]
    assert ends(open_gguf(tmp_path, tokens, eos_token_id=0)) == [0, 1]


def test_a_file_without_vocabulary_has_its_keys(tmp_path: Path):
    metadata = llama_metadata() | {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(metadata, gguf_f32({"token_embd.weight": np.ones((6, 8))})))
    assert GGUFCheckpoint(tmp_path / "x.gguf").generation_config == {"eos_token_id": 5}
