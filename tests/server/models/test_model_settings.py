"""Which models a command line asks for, each with its own settings."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.main import main, make_parser
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.model_settings import ModelSettings, has_several, max_loaded, read_models
from jaxllm.server.models.size import PROCESS_BYTES, memory_bytes, resident_bytes, weight_bytes

KV = ("--kv-cache-memory-bytes", "64M")


def parse(*words: str) -> Any:
    """Return the parsed words of `jaxllm serve`."""
    return make_parser()[0].parse_args(["serve", *words])


def read(*words: str) -> dict[str, ModelSettings]:
    """Return the models of `jaxllm serve` with these words, by their names."""
    args = parse(*words)
    assert has_several(args)
    return {each.names[0]: each for each in read_models(args)}


def write(folder: Path, value: Any) -> str:
    """Return a file of --models."""
    path = folder / "models.yaml"
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Return a folder of three models, with some files beside them."""
    folder = tmp_path / "models"
    for name in ("one/config.json", "one/model.safetensors", "two-00001-of-00002.gguf", "two-00002-of-00002.gguf"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"12345")
    for name in ("three.gguf", "mmproj-three.gguf", "notes.txt", "empty/readme"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"123")
    return folder


def test_one_model_is_served_as_ever(checkpoints: Path) -> None:
    for words in (["m"], ["--model", "m"], [str(checkpoints / "one")], [str(checkpoints / "empty")], []):
        assert not has_several(parse(*words)), words
    assert not has_several(parse(str(checkpoints / "three.gguf"), "--port", "8001"))
    assert parse("--port", "8001", "m").model_tag == ["m"]


def test_several_names(checkpoints: Path) -> None:
    models = read(str(checkpoints / "one"), "some/hub-id", "--max-model-len", "128")
    assert [each.engine_args.model for each in models.values()] == [str(checkpoints / "one"), "some/hub-id"]
    assert list(models) == ["one", "some/hub-id"]
    assert {each.engine_args.max_model_len for each in models.values()} == {128}
    assert {each.args.served_model_name[0] for each in models.values()} == set(models)


def test_a_folder_of_models(checkpoints: Path) -> None:
    models = read(str(checkpoints))
    assert {name: each.engine_args.model for name, each in models.items()} == {
        "three": str(checkpoints / "three.gguf"),
        "two": str(checkpoints / "two-00001-of-00002.gguf"),
        "one": str(checkpoints / "one"),
    }


def test_a_file_of_models_has_flags_for_each(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {
            "small": "org/small",
            "large": {
                "model": "org/large",
                "aliases": ["gpt-4o", "big"],
                "max-model-len": "2k",
                "chat_template": "x",
                "lora-modules": ["mine=org/adapter"],
                "enable-lora": True,
            },
        },
    )
    models = read("--models", file, "--max-model-len", "100")
    assert models["small"].engine_args.max_model_len == 100
    large = models["large"]
    assert (large.names, large.adapters) == (("large", "gpt-4o", "big"), ("mine",))
    assert (large.engine_args.max_model_len, large.engine_args.enable_lora) == (2000, True)
    assert (large.args.chat_template, models["small"].args.chat_template) == ("x", None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": 5}, "'a' must have a model"),
        ({"a": {"max-model-len": 5}}, "'a' must have a model"),
        ({"a": {"model": "m", "max-modle-len": 5}}, "Did you mean 'max-model-len'"),
        ({"a": {"model": "m", "port": 5}}, "no flag is called 'port'"),
        ({"a": {"model": "m", "aliases": [5]}}, "a: aliases must be"),
        ({"a": {"model": "m", "max-model-len": "many"}}, "a: max-model-len"),
        ({"a": {"model": "m", "aliases": "b"}, "b": "n"}, "two models have the name 'b'"),
        ({"a": {"model": "m", "data-parallel-size": 2}}, "data_parallel_size cannot go with several models"),
        ({}, "there is no model in"),
        ([], "must hold"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        read("--models", write(tmp_path, fields))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--api-server-count", "2"],
        ["--data-parallel-size", "2"],
        ["--nnodes", "2"],
        ["--grpc-port", "50051"],
        ["--headless"],
        ["--disable-frontend-multiprocessing"],
        ["--served-model-name", "x"],
        ["--lora-modules", "mine=/a"],
    ],
)
def test_what_several_models_cannot_have_is_refused_by_name(words: list[str]) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        read("a", "b", *words)
    name = words[0].removeprefix("--").replace("-", "_")
    assert str(caught.value).startswith(f"{name} cannot go with several models")


def test_flags_for_several_are_refused_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--max-loaded-models", "2"], ["--models-memory", "2G"]):
        assert main(["serve", "m", *words]) == 2
        assert "is for several models" in capsys.readouterr().err


def test_models_that_are_loaded_together_need_the_size_of_their_cache() -> None:
    assert (max_loaded(parse("a", "b")), max_loaded(parse("a", "b", "--models-memory", "2G"))) == (1, None)
    for words in (["--max-loaded-models", "2"], ["--models-memory", "2G"]):
        with pytest.raises(VLLMValidationError, match="'a' needs the size of its KV cache"):
            read("a", "b", *words)
        assert len(read("a", "b", *words, *KV)) == 2


def test_sizes_are_those_of_the_files_and_the_cache(checkpoints: Path) -> None:
    sizes = {name: weight_bytes(each.engine_args) for name, each in read(str(checkpoints)).items()}
    assert sizes == {"three": 3, "two": 10, "one": 5}
    assert weight_bytes(AsyncEngineArgs(model="org/not-here")) is None
    args = AsyncEngineArgs(model="m", kv_cache_memory_bytes=7)
    assert memory_bytes(args, 5) == 12 + PROCESS_BYTES
    assert memory_bytes(args, None) is memory_bytes(AsyncEngineArgs(model="m"), 5) is None


def test_the_memory_of_a_process_is_what_it_alone_has() -> None:
    """Pages that were written count, those of files do not; a process that has ended has none."""
    before = resident_bytes([os.getpid()])
    with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for offset in range(0, len(memory), mmap.PAGESIZE):
            memory[offset] = 1
        assert 60 * 2**20 <= resident_bytes([os.getpid()]) - before <= 80 * 2**20
    assert resident_bytes([2**22 + 1]) == 0
