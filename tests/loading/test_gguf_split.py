"""A model in several GGUF files opens by its first part or its folder, as llama.cpp's and gguf-split's are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.split_files import first_parts, part_names
from jaxllm.loading.open import open_checkpoint
from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata

NAMES = [f"m-q8-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
TENSORS = {
    "token_embd.weight": np.arange(48.0).reshape(6, 8),
    "output_norm.weight": np.ones(8),
    "blk.0.attn_norm.weight": np.full(8, 2.0),
}


def keys(number: int, **more: int) -> dict[str, Any]:
    return {f"split.{key}": value for key, value in ({"no": number, "count": 3, "tensors.count": 3} | more).items()}


def write(folder: Path, *, metadata: dict[str, Any] | None = None) -> list[Path]:
    """Write a model in three parts: the first has the metadata and no tensor, the others have the tensors."""
    (token, norm, layer), paths = TENSORS, [folder / name for name in NAMES]
    paths[0].write_bytes(gguf_bytes(llama_metadata() | keys(0) | (metadata or {}), {}))
    for number, names in ((1, [token, norm]), (2, [layer])):
        tensors = gguf_f32({name: TENSORS[name] for name in names})
        paths[number].write_bytes(gguf_bytes(keys(number), tensors))
    return paths


def test_first_part_and_folder(tmp_path: Path):
    paths = write(tmp_path)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"")
    for model in (paths[0], tmp_path):
        checkpoint = open_checkpoint(str(model))
        assert checkpoint.config["vocab_size"] == 6
        np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight"), TENSORS["token_embd.weight"])
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.input_layernorm.weight"), np.full(8, 2.0))
        checkpoint.release("model.norm.weight")
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), np.ones(8))


def refused(model: Path) -> str:
    with pytest.raises(VLLMValidationError) as error:
        open_checkpoint(str(model))
    assert error.value.parameter == "model"
    return str(error.value)


def test_a_later_part_names_the_first(tmp_path: Path):
    message = refused(write(tmp_path)[1])
    assert "it is a later part of 3; give the first one, m-q8-00001-of-00003.gguf" in message


def test_parts_that_do_not_fit(tmp_path: Path):
    paths = write(tmp_path)
    second, third = paths[1].read_bytes(), paths[2].read_bytes()
    paths[2].unlink()
    assert "its part m-q8-00003-of-00003.gguf is missing" in refused(tmp_path)
    paths[2].write_bytes(second)
    assert "in its part m-q8-00003-of-00003.gguf: it is part 2, though" in refused(tmp_path)
    paths[2].write_bytes(third[:-9])
    assert "in its part m-q8-00003-of-00003.gguf: tensor 'blk.0.attn_norm.weight' reaches past" in refused(tmp_path)
    paths[2].write_bytes(gguf_bytes(keys(2), gguf_f32({"output_norm.weight": np.ones(8)})))
    assert "tensor 'output_norm.weight' is in another part too" in refused(tmp_path)
    paths[2].write_bytes(gguf_bytes(keys(2), {}))
    assert "its parts have 2 tensors, but split.tensors.count is 3" in refused(tmp_path)
    paths[0].unlink()
    assert NAMES[0] in refused(tmp_path)


def test_names_that_do_not_fit(tmp_path: Path):
    first = write(tmp_path)[0]
    first.rename(tmp_path / "m.gguf")
    assert "one of 3 parts, which must be named NAME-00001-of-00003.gguf" in refused(tmp_path / "m.gguf")


@pytest.mark.parametrize("count", [-1, 2**32 - 1])
def test_counts_that_cannot_be(tmp_path: Path, count: int):
    (tmp_path / NAMES[0]).write_bytes(gguf_bytes(llama_metadata() | {"split.count": count}, {}))
    assert "split.count" in refused(tmp_path / NAMES[0])


def test_names():
    assert part_names("Q8/m-00002-of-00002.gguf") == ["Q8/m-00001-of-00002.gguf", "Q8/m-00002-of-00002.gguf"]
    assert part_names("m.gguf") == ["m.gguf"]
    names = ["Q8/m-00002-of-00002.gguf", "Q8/m-00001-of-00002.gguf", "m.Q4.gguf", "mmproj-F16.gguf", "README.md"]
    assert first_parts(names) == ["Q8/m-00001-of-00002.gguf", "m.Q4.gguf"]
