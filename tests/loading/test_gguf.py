"""The GGUF reader and its dequantizing agree with files made here and goldens made by the gguf package."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.loading.gguf.dequant import CHUNK_NUMBERS, dequantize
from jaxllm.loading.gguf.file import TENSOR_TYPES, GGUFFile
from tests.loading.files import F32, Q8_0, gguf_bytes, gguf_f32, gguf_string, gguf_value

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.count": 7,
    "a.negative": -3,
    "a.number": 0.5,
    "a.names": ["", "two", "\u2581drei"],
    "a.numbers": [1, 2, 3],
    "a.floats": [0.5, -1.5],
    "a.flags": [True, False],
}
TENSORS = gguf_f32({"w": np.arange(6.0).reshape(2, 3), "v": np.arange(5.0)})


def read(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return GGUFFile(path)


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(tmp_path: Path, version: int):
    file = read(tmp_path / "x.gguf", gguf_bytes(METADATA, TENSORS, version=version))
    assert file.keys == tuple(METADATA)
    assert file.value("a.flag", bool) is True
    assert file.value("a.count", int) == 7
    assert file.value("a.negative", int) == -3
    assert file.value("a.number", float) == 0.5
    assert file.value("a.absent", int, 9) == 9
    assert file.strings("a.names") == METADATA["a.names"]
    assert file.array("a.numbers").tolist() == [1, 2, 3]
    assert file.array("a.floats").tolist() == [0.5, -1.5]
    assert file.array("a.flags").tolist() == [True, False]
    assert file.tensors["w"].shape == (2, 3)
    assert file.data("w").view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    file.release("v")
    assert file.data("v").view(np.float32).tolist() == [[0, 1, 2, 3, 4]]


def test_alignment_of_the_file_is_used(tmp_path: Path):
    data = gguf_bytes(METADATA | {"general.alignment": 64}, TENSORS, alignment=64)
    assert read(tmp_path / "x.gguf", data).data("v").view(np.float32).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("key", "kind"), [("a.count", str), ("a.flag", int), ("a.names", int)])
def test_a_value_of_another_type_is_an_error(tmp_path: Path, key: str, kind: type):
    file = read(tmp_path / "x.gguf", gguf_bytes(METADATA, TENSORS))
    with pytest.raises(ValueError, match=key):
        file.value(key, kind)


def start(version: int = 3, num_tensors: int = 0, num_values: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


GOOD = gguf_bytes(METADATA, TENSORS)
PAIR = gguf_string("k") + gguf_value(1)
BAD = {
    "empty file": b"",
    "another magic": b"GGML" + GOOD[4:],
    "version 1": start(1) + PAIR,
    "version 4": start(4) + PAIR,
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "more tensors than bytes": start(num_tensors=2**60),
    "more values than bytes": start(num_values=2**60),
    "key longer than the file": start() + struct.pack("<Q", 2**63) + b"k",
    "unknown value type": start() + gguf_string("k") + struct.pack("<I", 99) + b"\0" * 8,
    "array of arrays": start() + gguf_string("k") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 32,
    "array longer than the file": start() + gguf_string("k") + struct.pack("<IIQ", 9, 4, 2**62),
    "strings longer than the file": start() + gguf_string("k") + struct.pack("<IIQ", 9, 8, 2**40) + b"\0" * 64,
    "key that is not UTF-8": start() + struct.pack("<Q", 1) + b"\xff" + gguf_value(1),
    "the same key twice": start(num_values=2) + PAIR + PAIR,
    "cut inside the metadata": GOOD[:60],
    "cut inside the tensor data": GOOD[:-40],
    "alignment 0": gguf_bytes({"general.alignment": 0}, TENSORS),
    "alignment 24": gguf_bytes({"general.alignment": 24}, TENSORS),
    "alignment of text": gguf_bytes({"general.alignment": "32"}, TENSORS),
    "alignment that shifts the data": gguf_bytes({"general.alignment": 256}, TENSORS, alignment=32),
    "unknown tensor type": gguf_bytes({}, {"w": (77, (32,), b"\0" * 32)}),
    "unsupported tensor type": gguf_bytes({}, {"w": (22, (256,), b"\0" * 82)}),
    "row of half a block": gguf_bytes({}, {"w": (Q8_0, (2, 16), b"\0" * 34)}),
    "shape beyond 64 bits": gguf_bytes({}, {"w": (F32, (2**40, 2**40), b"\0" * 64)}),
    "five dimensions": gguf_bytes({}, {"w": (F32, (1, 1, 1, 1, 1), b"\0" * 4)}),
    "no dimensions": gguf_bytes({}, {"w": (F32, (), b"\0" * 4)}),
    "the same tensor twice": GOOD.replace(gguf_string("v"), gguf_string("w")),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_malformed_files_are_value_errors(tmp_path: Path, data: bytes):
    with pytest.raises(ValueError, match=r".{10,}"):
        read(tmp_path / "x.gguf", data)


UNREAD_TYPES = {
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ1_S": 19,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ1_M": 29,
    "TQ1_0": 34,
    "TQ2_0": 35,
    "NVFP4": 40,
}
"""The types of quantized files that are not read, with llama.cpp's numbers."""


@pytest.mark.parametrize(("name", "number"), UNREAD_TYPES.items())
def test_an_unsupported_quantization_is_named(tmp_path: Path, name: str, number: int):
    with pytest.raises(ValueError, match=rf"'w' has the type {name}, .*Q4_K.*llama-quantize --allow-requantize"):
        read(tmp_path / "x.gguf", gguf_bytes({}, {"w": (number, (256,), b"\0" * 82)}))


def test_a_big_endian_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"a big-endian GGUF file.*Convert it with.*gguf_convert_endian\.py"):
        read(tmp_path / "x.gguf", BAD["big endian"])


@pytest.mark.parametrize("name", [kind.name for kind in TENSOR_TYPES.values() if kind.name != "F32"])
def test_dequantizing_is_bitwise_the_reference(repository: Path, name: str):
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    with np.load(repository / "tests/data/gguf/quants.npz") as goldens:
        data, values = goldens[f"{name}_data"], goldens[f"{name}_values"]
    numbers = dequantize(kind, data)
    assert numbers.dtype == np.float32
    assert numbers.shape == values.shape
    assert np.ptp(values) > 0.1
    np.testing.assert_array_equal(numbers, values)


def test_dequantizing_more_than_one_chunk(repository: Path):
    kind = TENSOR_TYPES[12]
    with np.load(repository / "tests/data/gguf/quants.npz") as goldens:
        data, values = goldens["Q4_K_data"], goldens["Q4_K_values"]
    copies = 3 * CHUNK_NUMBERS // values.size + 1
    np.testing.assert_array_equal(dequantize(kind, np.tile(data, (copies, 1))), np.tile(values, (copies, 1)))
