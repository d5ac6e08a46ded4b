"""Tokenizers from disk encode as transformers does, need no transformers, and are never an error."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from jaxllm.loading.open import open_checkpoint
from jaxllm.text import tokenizer_cache
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.text.tokenizer_parts import TokenizerParts
from tests.engine.support import byte_fallback, byte_level
from tests.models.tiny import folder as tiny_folder

TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces\n\n\tand\r\na tab ",
    "<|end|>a<|im_start|> b <s></s> <unk>",
    "12345 don't naïve 你好 🎉 \u0301 e\u0301 ﬁ \u200b",
    "x" * 5000,
]


def texts() -> list[str]:
    rng = random.Random()
    points = [*range(0x20, 0x250), *range(0x4E00, 0x4E40), *range(0x1F600, 0x1F640)]
    return TEXTS + ["".join(map(chr, rng.choices(points, k=rng.randint(1, 40)))) for _ in range(50)]


def fill(folder: Path, hf: Any) -> Path:
    """Write a checkpoint without weights."""
    shutil.copytree(tiny_folder("llama3_tied"), folder)
    hf.save_pretrained(folder)
    return folder


def load(model: Path | str, cache: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(model)), str(cache))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return fill(tmp_path / "model", byte_level(bos=True).hf)


def check_is_the_same(model: Path | str, reference: Any, cache: Path) -> None:
    """Compare a tokenizer that is made, and one from disk, with transformers'."""
    parts = Tokenizer.of(reference).parts
    for tokenizer in (load(model, cache), load(model, cache)):
        assert tokenizer.eos_token_id == reference.eos_token_id
        for add_special_tokens in (True, False):
            inputs = texts()
            ids = tokenizer.encode(inputs, add_special_tokens=add_special_tokens)
            assert ids == reference(inputs, add_special_tokens=add_special_tokens)["input_ids"]
            for skip in (True, False):
                assert tokenizer.backend.decode_batch(ids, skip_special_tokens=skip) == [
                    reference.backend_tokenizer.decode(each, skip_special_tokens=skip) for each in ids
                ]
        cut = reference(["one two three four"], truncation=True, max_length=3)["input_ids"]
        assert tokenizer.encode(["one two three four"], keep=3) == cut
        assert tokenizer.encode([], keep=3) == []
        assert tokenizer.added_tokens == {key: token.content for key, token in reference.added_tokens_decoder.items()}
        assert tokenizer.parts == parts
    assert list((cache / "tokenizers").iterdir())


@pytest.mark.parametrize("make", [byte_level, lambda: byte_level(bos=True), byte_fallback])
def test_the_same_as_transformers(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    model = fill(tmp_path / "model", make().hf)
    check_is_the_same(model, AutoTokenizer.from_pretrained(model), tmp_path / "cache")


def test_a_real_one_is_the_same(smollm2_path: str, tmp_path: Path) -> None:
    check_is_the_same(smollm2_path, open_checkpoint(smollm2_path).tokenizer(), tmp_path)


def test_settings_of_transformers_that_its_files_carry(tmp_path: Path) -> None:
    """What a tokenizer.json says of truncation and padding does not count, and special tokens may be split."""
    hf: Any = byte_level(bos=True).hf
    hf.backend_tokenizer.enable_truncation(2)
    hf.backend_tokenizer.enable_padding(length=9)
    hf.split_special_tokens = True
    model = fill(tmp_path / "model", hf)
    reference: Any = AutoTokenizer.from_pretrained(model)
    for split in (True, False):
        reference.split_special_tokens = split
        copy = Tokenizer.of(reference)
        reference(TEXTS, truncation=True, max_length=1)  # changes its own settings alone
        assert copy.encode(TEXTS) == reference(TEXTS)["input_ids"]


def test_one_that_splits_special_tokens_is_kept_so(tmp_path: Path) -> None:
    hf: Any = byte_level().hf
    hf.split_special_tokens = True
    model = fill(tmp_path / "model", hf)
    config = model / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"split_special_tokens": true,', 1))
    reference: Any = AutoTokenizer.from_pretrained(model)
    assert reference.split_special_tokens
    for _ in range(2):
        assert load(model, tmp_path / "cache").encode(TEXTS) == reference(TEXTS)["input_ids"]
    assert len(list((tmp_path / "cache/tokenizers").iterdir())) == 1


def test_all_that_chat_templates_need_is_kept(tmp_path: Path) -> None:
    hf: Any = byte_level(bos=True).hf
    hf.add_special_tokens({"bos_token": "<s>", "extra_special_tokens": ["<|im_end|>"]})
    hf.chat_template = {"default": "a", "tool_use": "b"}
    model = fill(tmp_path / "model", hf)
    config = model / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"truncation_side": "left",', 1))
    for _ in range(2):
        parts = load(model, tmp_path / "cache").parts
        assert parts.chat_template == {"default": "a", "tool_use": "b"}
        assert parts.special_tokens == hf.special_tokens_map == {"bos_token": "<s>", "eos_token": "<|end|>"}
        assert parts.truncation_side == "left"


def test_a_kept_tokenizer_is_parsed_when_it_is_needed(model: Path, tmp_path: Path) -> None:
    load(model, tmp_path / "cache")
    (path,) = (tmp_path / "cache/tokenizers").iterdir()
    path.write_bytes(msgspec.msgpack.encode(TokenizerParts(b"no JSON")))
    passed_on = load(model, tmp_path / "cache")
    assert passed_on.parts.tokenizer_json == b"no JSON"
    with pytest.raises(Exception, match="expected"):
        passed_on.encode(["hello"])


def test_the_second_time_transformers_is_not_imported(model: Path, tmp_path: Path, repository: Path) -> None:
    code = (
        "import sys\n"
        "from jaxllm.text.tokenizer import load_tokenizer\n"
        "from jaxllm.loading.open import open_checkpoint\n"
        "tokenizer = load_tokenizer(open_checkpoint(sys.argv[1]), sys.argv[2])\n"
        "from jaxllm.text.chat import ChatRenderer\n"
        "prompt = ChatRenderer(tokenizer, None).render([{'role': 'user', 'content': 'hi'}], 'messages')\n"
        "print(tokenizer.encode(['hello world', prompt.text]), 'transformers' in sys.modules)\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, str(model), str(tmp_path / "cache")],
            cwd=repository, capture_output=True, text=True, check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert [run.split()[-1] for run in runs] == ["True", "False"]
    assert runs[0].rsplit(maxsplit=1)[0] == runs[1].rsplit(maxsplit=1)[0]


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "additional_chat_templates/tool_use.jinja"]
)
def test_a_changed_file_is_a_miss(model: Path, tmp_path: Path, name: str) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    load(model, tmp_path / "cache")
    (model / name).write_text((model / name).read_text() + "\n")
    load(model, tmp_path / "cache")
    assert len(list((tmp_path / "cache/tokenizers").iterdir())) == 2


def test_other_versions_are_a_miss(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model, tmp_path / "cache")
    monkeypatch.setattr(tokenizer_cache.metadata, "version", lambda name: "0")
    load(model, tmp_path / "cache")
    assert len(list((tmp_path / "cache/tokenizers").iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"\xff", b"{}\n{}", b'{"eos_token_id": 1}\n', None])
def test_a_broken_file_counts_as_none(
    model: Path, tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = load(model, tmp_path / "cache")
    (path,) = (tmp_path / "cache/tokenizers").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with caplog.at_level("WARNING", "jaxllm"):
        assert load(model, tmp_path / "cache").encode(TEXTS) == made.encode(TEXTS)
    assert "made again" in caplog.text
    assert path.read_bytes() == whole


def test_a_folder_with_a_file_that_cannot_be_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "state.json":
            raise PermissionError
        return read(path)

    (model / "state.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert load(model, tmp_path / "cache").encode(["hello"])
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    with caplog.at_level("WARNING", "jaxllm"):
        assert load(model, tmp_path / "cache").encode(["hello"])
    assert "cannot be kept" in caplog.text


def test_gguf_metadata_is_the_digest(smollm2_path: str, gemma_path: str) -> None:
    digests = {open_checkpoint(path).tokenizer_digest() for path in (smollm2_path, gemma_path, smollm2_path)}
    assert len(digests) == 2
