"""Local folders and files are opened, and errors say what is missing or corrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading import folder
from jaxllm.loading.open import open_checkpoint, open_config
from jaxllm.resolve.checkpoint_settings import find_family
from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata, write_folder, write_sharded_folder

A = {"a": np.arange(4, dtype=np.float32), "b": np.ones((2, 3), np.float16)}
SHARDS = {"model-00001-of-00002.safetensors": {"a": A["a"]}, "model-00002-of-00002.safetensors": {"b": A["b"]}}


def refused(path: Path | str, *words: str, parameter: str = "model", **options: Any) -> None:
    """Assert that opening is refused with an error that has all the words."""
    with pytest.raises(VLLMValidationError) as error:
        open_checkpoint(str(path), **options)
    assert error.value.parameter == parameter
    for word in words:
        assert word in str(error.value)


def test_single_file(tmp_path: Path):
    checkpoint = open_checkpoint(str(write_folder(tmp_path, A)))
    assert {name: (info.shape, info.dtype, info.num_bytes) for name, info in checkpoint.tensors.items()} == {
        "a": ((4,), "float32", 16),
        "b": ((2, 3), "float16", 12),
    }
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]}
    assert (checkpoint.is_gguf, checkpoint.dtype) == (False, "float16")
    assert checkpoint.generation_config == {}
    checkpoint.fetch()
    np.testing.assert_array_equal(checkpoint.read("a"), A["a"])


def test_a_config_alone(tmp_path: Path):
    """The config comes from a folder without weights or tokenizer, a file of any name, or a GGUF file's header."""
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "torch_dtype": "bfloat16"}')
    (tmp_path / "other.json").write_text('{"architectures": ["B"]}')
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(llama_metadata(), gguf_f32({"token_embd.weight": np.ones((6, 8))})))
    for name, architecture in (("", "A"), ("config.json", "A"), ("other.json", "B"), ("m.gguf", "LlamaForCausalLM")):
        checkpoint = open_config(str(tmp_path / name))
        assert checkpoint.config["architectures"] == [architecture]
        assert checkpoint.tensors == {}
    assert open_config(str(tmp_path)).dtype == "bfloat16"


@pytest.mark.parametrize("name", ["absent.json", "./absent", "list.json", "text.txt"])
def test_a_config_that_is_none(tmp_path: Path, name: str):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.txt").write_text("{}")
    with pytest.raises(VLLMValidationError) as error:
        open_config(str(tmp_path / name))
    assert error.value.parameter == "model"


def test_by_index(tmp_path: Path):
    folder = write_sharded_folder(tmp_path, SHARDS)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    checkpoint = open_checkpoint(str(folder), load_format="safetensors")
    assert set(checkpoint.tensors) == {"a", "b"}
    np.testing.assert_array_equal(checkpoint.read("b"), A["b"])
    assert checkpoint.generation_config == {"eos_token_id": 2}


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path):
    folder = write_sharded_folder(tmp_path, SHARDS)
    (folder / "consolidated.safetensors").write_bytes(b"no safetensors")
    assert set(open_checkpoint(str(folder)).tensors) == {"a", "b"}


def test_missing_shard(tmp_path: Path):
    folder = write_sharded_folder(tmp_path, SHARDS)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "not there")


def test_short_shard(tmp_path: Path):
    folder = write_sharded_folder(tmp_path, SHARDS)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    refused(folder, "model-00002-of-00002.safetensors", "cut short")


def test_index_that_does_not_match_its_shard(tmp_path: Path):
    folder = write_sharded_folder(tmp_path, SHARDS)
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weights | {"c": "model-00001-of-00002.safetensors"}}))
    refused(folder, "'c'", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x"}}'])
def test_bad_index(tmp_path: Path, text: str):
    folder = write_sharded_folder(tmp_path, SHARDS)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_bad_config(tmp_path: Path, text: str):
    write_folder(tmp_path, A)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    refused(tmp_path, "config.json")


def test_no_config(tmp_path: Path):
    refused(tmp_path, "there is no config.json")


def test_only_other_formats(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no .safetensors or .bin files")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "pytorch_model.bin", "no zip file")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "tf_model.h5")
    refused(tmp_path, "no .safetensors or .bin files", "there is tf_model.h5")


def test_dummy_needs_no_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    assert (dict(checkpoint.tensors), checkpoint.dtype) == ({}, "bfloat16")
    with pytest.raises(ValueError, match="dummy"):
        checkpoint.read("a")


def test_gguf_in_a_folder(tmp_path: Path):
    data = gguf_bytes(llama_metadata(), gguf_f32({"token_embd.weight": np.ones((6, 8))}))
    (tmp_path / "x.gguf").write_bytes(data)
    for path in (tmp_path, tmp_path / "x.gguf"):
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.source == str(path)
        assert set(checkpoint.tensors) == {"model.embed_tokens.weight"}
        assert dict(open_checkpoint(str(path), load_format="dummy" if path.is_file() else "gguf").tensors) == (
            {} if path.is_file() else dict(checkpoint.tensors)
        )
    (tmp_path / "y.gguf").write_bytes(data)
    refused(tmp_path, "x.gguf, y.gguf", load_format="gguf")


def test_a_corrupt_gguf_is_named(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "x.gguf", "x.gguf", "cut short")


def test_a_single_safetensors_file_is_no_model(tmp_path: Path):
    write_folder(tmp_path, A)
    refused(tmp_path / "model.safetensors", "give the folder")


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "~/absent", "a/b/c", "absent.gguf", "org/absent.gguf"])
def test_paths_that_are_not_there(model: str):
    refused(model, "neither a folder nor a file")


def test_names_that_the_system_does_not_take():
    refused("~no-such-user/model", "neither a folder nor a file")
    refused("./" + "x" * 300, "neither a folder nor a file")


@pytest.mark.parametrize("name", ["npcache", "bitsandbytes", "runai_streamer", "x"])
def test_other_load_formats_are_refused_by_name(tmp_path: Path, name: str):
    refused(tmp_path, f"load_format={name!r}", "safetensors", parameter="load_format", load_format=name)


TOKENIZER = Tokenizer(models.BPE({"a": 0}, [])).to_str()


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ({"model_type": "qwen3"}, "Qwen3ForCausalLM"),
        ({"model_type": "qwen3", "architectures": None}, "Qwen3ForCausalLM"),
        ({"model_type": "gemma3", "architectures": [], "text_config": {}}, "Gemma3ForConditionalGeneration"),
        ({"model_type": "bert"}, "BertModel"),
        ({"model_type": "qwen3", "architectures": ["Own"]}, "Own"),
    ],
)
def test_an_architecture_that_is_left_out_is_that_of_the_model_type(
    tmp_path: Path, config: dict[str, Any], architecture: str
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = open_config(str(tmp_path / "config.json")).config
    assert (find_family("x", config)[0] if architecture != "Own" else config["architectures"][0]) == architecture


@pytest.mark.parametrize("config", [{}, {"model_type": "no such type"}, {"model_type": 3}])
def test_an_architecture_that_nothing_tells_of(tmp_path: Path, config: dict[str, Any]):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not open_config(str(tmp_path / "config.json")).config.get("architectures")


def test_a_tokenizer_does_not_depend_on_what_else_a_config_says(tmp_path: Path):
    """HF refuses this RoPE, which hf_overrides may have mended for the model."""
    write_folder(tmp_path, A)
    config = {"model_type": "qwen3", "rope_scaling": {"rope_type": "linear"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    assert "Qwen2" in type(open_checkpoint(str(tmp_path)).tokenizer()).__name__


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is none of tokenizer.json"),
        ({"tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}'}, "there is none of tokenizer.json"),
        ({"tokenizer.model": "x"}, "there is tokenizer.model and no tokenizer.json: .* package sentencepiece"),
    ],
)
def test_a_tokenizer_without_its_files(
    tmp_path: Path, files: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(folder, "find_spec", lambda name: None)
    write_folder(tmp_path, A)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(VLLMValidationError, match=message) as error:
        open_checkpoint(str(tmp_path)).tokenizer()
    assert error.value.parameter == "tokenizer"
    assert "huggingface.co" not in str(error.value)


def test_a_tokenizer_that_needs_code_is_refused(tmp_path: Path):
    write_folder(tmp_path, A)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the checkpoint was run')")
    with pytest.raises(VLLMValidationError, match="tokenizer=") as error:
        open_checkpoint(str(tmp_path)).tokenizer()
    assert error.value.parameter == "tokenizer"
