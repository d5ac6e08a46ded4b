"""The safetensors reader gives right values without a copy, and an error for every way a header can lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.loading.safetensors import SafetensorsFile
from tests.loading.files import SAFETENSORS_NAMES, safetensors_bytes


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", SAFETENSORS_NAMES, ids=str)
def test_reads_every_dtype(tmp_path: Path, dtype: np.dtype):
    tensors = {"a": np.arange(6).reshape(2, 3).astype(dtype), "scalar": np.array(1).astype(dtype)}
    file = SafetensorsFile(write(tmp_path / "x.safetensors", safetensors_bytes(tensors)))
    for name, tensor in tensors.items():
        result = file.read(name)
        assert result.dtype == dtype
        assert result.shape == tensor.shape
        assert result.tobytes() == tensor.tobytes()


def test_reads_what_the_reference_writes(tmp_path: Path):
    rng = np.random.default_rng(0)
    tensors = {"w": rng.standard_normal((5, 7)).astype(np.float32), "b": rng.standard_normal(3).astype(np.float16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.entries) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(file.read(name), tensor)


def test_tensors_are_views_and_survive_release(tmp_path: Path):
    tensors = {"a": np.arange(100_000, dtype=np.float32)}
    file = SafetensorsFile(write(tmp_path / "x.safetensors", safetensors_bytes(tensors)))
    view = file.read("a")
    assert view.base is not None
    assert not view.flags.writeable
    file.release("a")
    np.testing.assert_array_equal(view, tensors["a"])


BAD = {
    "empty file": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the file": struct.pack("<Q", 100) + b"{}",
    "huge header": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": struct.pack("<Q", 2) + b"{[",
    "JSON of another kind": struct.pack("<Q", 2) + b"[]",
    "bytes after the tensors": with_header({"a": entry("F32", [1], 0, 4)}, b"\0" * 5),
    "too few bytes": with_header({"a": entry("F32", [2], 0, 8)}, b"\0" * 7),
    "range does not fit the shape": with_header({"a": entry("F32", [1], 0, 8)}, b"\0" * 8),
    "overlap": with_header({"a": entry("I8", [4], 0, 4), "b": entry("I8", [4], 2, 6)}, b"\0" * 6),
    "hole": with_header({"a": entry("I8", [2], 0, 2), "b": entry("I8", [2], 4, 6)}, b"\0" * 6),
    "unknown dtype": with_header({"a": entry("F13", [1], 0, 4)}, b"\0" * 4),
    "negative size": with_header({"a": entry("I8", [-1, -4], 0, 4)}, b"\0" * 4),
    "negative offset": with_header({"a": entry("I8", [4], -4, 0)}, b"\0" * 4),
    "reversed range": with_header({"a": entry("I8", [4], 4, 0)}, b"\0" * 4),
    "product beyond 64 bits": with_header({"a": entry("F32", [2**40, 2**40], 0, 4)}, b"\0" * 4),
    "size beyond 64 bits": with_header({"a": entry("F32", [2**80], 0, 4)}, b"\0" * 4),
    "no shape": with_header({"a": {"dtype": "I8", "data_offsets": [0, 1]}}, b"\0"),
    "millions of sizes": with_header({"a": entry("I8", [0] * 500_000, 0, 0)}, b""),
    "unknown field": with_header({"a": entry("I8", [1], 0, 1) | {"code": "x"}}, b"\0"),
    "deep nesting": struct.pack("<Q", 50_005) + b'{"a":' + b"[" * 50_000,
    "text that is not UTF-8": struct.pack("<Q", 6) + b'{"\xff":1}'[:6],
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_malformed_files_are_value_errors(tmp_path: Path, data: bytes):
    with pytest.raises(ValueError, match=r".{10,}") as error:
        SafetensorsFile(write(tmp_path / "x.safetensors", data))
    assert len(str(error.value)) < 1000


def test_empty_tensors_are_allowed(tmp_path: Path):
    tensors = {"a": np.zeros((0, 3), np.float32), "b": np.ones(2, ml_dtypes.bfloat16), "c": np.zeros(0, np.int8)}
    file = SafetensorsFile(write(tmp_path / "x.safetensors", safetensors_bytes(tensors)))
    assert file.read("a").shape == (0, 3)
    assert file.read("b").tolist() == [1, 1]
