"""PyTorch's .bin files are read as PyTorch wrote them, and what is no state dict is refused before anything runs."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.open import open_checkpoint
from jaxllm.loading.torch_files.archive import TorchFile
from jaxllm.lora.peft import PeftAdapter
from tests.loading.files import write_folder
from tests.loading.torch_writer import (
    DICT,
    STORAGES,
    Call,
    Name,
    Storage,
    program,
    storage_of,
    tensor,
    torch_bytes,
    zip_bytes,
)

DATA = Path(__file__).resolve().parents[1] / "data"
FLOATS = Storage(Name("torch", "FloatStorage"), "0", 6)
RNG = np.random.default_rng()
SIX = np.arange(6, dtype=np.float32)


def refused(path: Path, *words: str) -> None:
    """Assert that a file is refused with an error that has all the words."""
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in words)):
        TorchFile(path)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def one(path: Path, value: Any) -> Path:
    """Write a file with one storage of six floats, and this value as the pickle."""
    return write(path, zip_bytes(program(value), {"0": SIX.tobytes()}))


def test_a_file_of_pytorch_itself():
    file = TorchFile(DATA / "torch/tensors.bin")
    expected = {
        "weight": SIX.reshape(2, 3),
        "bias": np.array([0.5, -2.0], np.float32),
        "parameter": np.arange(4, dtype=np.float16),
        "trained": np.arange(3, dtype=np.float32),
        "part": np.arange(12).reshape(3, 4).T[1:],
        "again": SIX.reshape(2, 3),
        "scalar": np.array(3.0, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "bool": np.arange(5).astype(np.bool_),
    }
    kinds = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")
    expected |= {name: np.arange(5).astype(name) for name in kinds}
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        expected[name] = np.arange(5).astype(getattr(ml_dtypes, name))
    assert set(file.entries) == set(expected)
    for name, array in expected.items():
        read, entry = file.read(name), file.entries[name]
        assert (read.dtype, read.shape) == (array.dtype, array.shape) == (entry.dtype, entry.shape)
        assert entry.num_bytes == array.nbytes
        np.testing.assert_array_equal(read, array)
        file.release(name)
        np.testing.assert_array_equal(file.read(name), array)
    assert not file.read("weight").flags.writeable  # a view of the file


def test_random_tensors_of_every_dtype(tmp_path: Path):
    arrays = {}
    for name in STORAGES:
        shape = tuple(RNG.integers(1, 6, RNG.integers(0, 4)))
        arrays[f"layers.{name}"] = (RNG.standard_normal(shape) * 9).astype(getattr(ml_dtypes, name, name))
    file = TorchFile(write(tmp_path / "x.bin", torch_bytes(arrays)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.read(name), array)
        assert file.read(name).dtype == array.dtype


def test_views_of_one_storage(tmp_path: Path):
    views = {"rows": tensor(FLOATS, (2, 2), (3, 1), 1), "column": tensor(FLOATS, (2,), (3,), 2)}
    file = TorchFile(one(tmp_path / "x.bin", views))
    np.testing.assert_array_equal(file.read("rows"), SIX.reshape(2, 3)[:, 1:])
    np.testing.assert_array_equal(file.read("column"), [2, 5])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("old.bin", ("before 1.6", "save it again")),
        ("model.bin", ("torch.nn.modules.linear.Linear", "refused", "model.state_dict()")),
        ("training.bin", ("'step'", "int, no tensor", "model.state_dict()")),
    ],
)
def test_other_files_of_pytorch(name: str, words: tuple[str, ...]):
    refused(DATA / "torch" / name, *words)


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "builtins eval",
        "torch.nn.modules.linear Linear",
        "torch._utils _rebuild_sparse_tensor",
        "torch load",
    ],
)
def test_no_other_function_is_named(tmp_path: Path, name: str):
    module, _, function = name.partition(" ")
    told = tmp_path / "told"
    call = Call(Name(module, function), (f"touch {told}",))
    refused(one(tmp_path / "x.bin", {"a": tensor(FLOATS, (6,)), "b": call}), f"{module}.{function}", "refused")
    assert not told.exists()


@pytest.mark.parametrize(
    ("pickle", "words"),
    [
        (b"\x80\x02(X\x02\x00\x00\x00os\x8c\x06system\x93.", ("SHORT_BINUNICODE",)),
        (b"\x80\x02cos\nsystem\n(S'true'\ntR.", ("os.system", "refused")),
        (b"\x80\x02(ios\nsystem\n.", ("INST",)),
        (b"\x80\x02\x82\x01.", ("EXT1",)),
        (b"\x80\x02}b.", ("corrupt",)),
        (b"\x80\x02.", ("corrupt",)),
        (b"\x80\x02u.", ("corrupt",)),
        (b"\x80\x02h\x05.", ("corrupt",)),
        (b"\x80\x02X\xff\xff\xff\x7fa", ("corrupt",)),
        (b"\x80\x02\x8a\xff.", ("corrupt",)),
        (b"\x80\x02}", ("corrupt",)),
        (b"", ("corrupt",)),
        (b"\xff\xff", ("corrupt",)),
        (b"\x80\x02K\x01.", ("holds int",)),
        (b"\x80\x02r\xff\xff\xff\x7f.", ("corrupt",)),
        (b"\x80\x02}}}s.", ("dict where a str",)),
        (b"\x80\x02}(X\x01\x00\x00\x00au.", ("corrupt",)),
        (b"\x80\x02" + 200_000 * b"(" + b".", ("corrupt",)),
        (b"\x80\x02)" + 200_000 * b"\x85" + b".", ("holds tuple",)),
        (b"\x80\x02}X\x01\x00\x00\x00a)" + 200_000 * b"\x85" + b"s.", ("tuple, no tensor",)),
    ],
)
def test_corrupt_and_hostile_pickles(tmp_path: Path, pickle: bytes, words: tuple[str, ...]):
    refused(write(tmp_path / "x.bin", zip_bytes(pickle, {})), *words)


def test_a_pickle_too_long_for_a_state_dict(tmp_path: Path):
    refused(write(tmp_path / "x.bin", zip_bytes(bytes((32 << 20) + 1), {})), "over", "no state dict")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tensor(FLOATS, (7,)), ("larger than its storage", "6 numbers")),
        (tensor(FLOATS, (6,), offset=1), ("larger than its storage",)),
        (tensor(FLOATS, (3, 2), (4, 1)), ("larger than its storage",)),
        (tensor(FLOATS, (2**62, 2**62), (0, 0)), ("larger than its storage",)),
        (tensor(FLOATS, (2, 6), (0, 1)), ("larger than its storage",)),
        (tensor(FLOATS, (2, 3), (2**70, 1)), ("larger than its storage",)),
        (tensor(FLOATS, (2,), (-1,), 5), ("strides (-1,)",)),
        (tensor(FLOATS, (-2,), (1,)), ("shape (-2,)",)),
        (tensor(FLOATS, (2,), (1,), -4), ("offset -4",)),
        (tensor(FLOATS, (2, 3), (1,)), ("strides (1,)",)),
        (tensor(FLOATS, (1,) * 40), ("shape",)),
        (tensor(FLOATS, (2.0,), (1,)), ("shape (2.0,)",)),
        (tensor(FLOATS, (True,), (1,)), ("shape (True,)",)),
        (tensor(FLOATS, (2,), (1,), None), ("NoneType where a int",)),
        (tensor(FLOATS._replace(size=5), (5,)), ("has 24 bytes, expected 20",)),
        (tensor(FLOATS._replace(size=2**64), (5,)), ("has 24 bytes",)),
        (tensor(FLOATS._replace(size=-1), ()), ("has 24 bytes",)),
        (tensor(FLOATS._replace(key="1"), (6,)), ("storage '1' is not there",)),
        (tensor(FLOATS._replace(kind=Name("torch", "uint8")), (6,)), ("storage of the type torch.uint8",)),
        (Call(Name("torch._utils", "_rebuild_tensor_v2"), (FLOATS,)), ("1 arguments",)),
        (Call(Name("torch._utils", "_rebuild_tensor_v2"), (6, 0, (6,), (1,), False, DICT)), ("int where a Storage",)),
        (Call(Name("torch._utils", "_rebuild_parameter"), (3, True, DICT)), ("int where a StoredTensor",)),
        (Call(Name("torch", "float32"), ()), ("0 arguments",)),
        (3, ("'a' in it is int",)),
        (Name("torch", "float32"), ("'a' in it is torch.float32",)),
        ({"b": tensor(FLOATS, (6,))}, ("'a' in it is dict", "state_dict() alone")),
        ([1, 2.5], ("'a' in it is list",)),
    ],
)
def test_values_that_are_no_tensors_of_the_file(tmp_path: Path, value: Any, words: tuple[str, ...]):
    refused(one(tmp_path / "x.bin", {"a": value}), *words)


def test_zip_files_that_are_refused(tmp_path: Path):
    arrays, path = {"a": SIX}, tmp_path / "x.bin"
    pickle = program({"a": tensor(storage_of(SIX, "0"), (6,))})
    whole = torch_bytes(arrays)
    for data in (b"", b"PK", whole[:100], whole[:-30], whole[: len(whole) // 2]):
        path.write_bytes(data)
        refused(path, "cut short or corrupt")
    refused(write(path, zip_bytes(pickle, {"0": SIX.tobytes()}, compression=zipfile.ZIP_DEFLATED)), "compressed")
    refused(write(path, zip_bytes(pickle, {"0": SIX.tobytes()}, more={"byteorder": b"big"})), "byte order", "big")
    refused(write(path, zip_bytes(pickle, {"0": SIX.tobytes()}, more={"constants.pkl": b""})), "not of a state dict")
    refused(write(path, zip_bytes(pickle, {})), "storage '0' is not there")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"")
    refused(path, "not of a state dict")
    # The directory's offset of the storage leads elsewhere.
    start = whole.rindex(b"PK\1\2")
    moved = whole[: start + 42] + struct.pack("<I", 5) + whole[start + 46 :]
    path.write_bytes(moved)
    refused(path, "corrupt")


def test_safetensors_are_preferred(tmp_path: Path):
    folder = write_folder(tmp_path, {"a": SIX})
    write(folder / "pytorch_model.bin", torch_bytes({"b": SIX}))
    for load_format, name in (("auto", "a"), ("hf", "a"), ("safetensors", "a"), ("pt", "b")):
        assert set(open_checkpoint(str(folder), load_format=load_format).tensors) == {name}
    (folder / "model.safetensors").unlink()
    for load_format in ("auto", "hf", "pt"):
        checkpoint = open_checkpoint(str(folder), load_format=load_format)
        info = checkpoint.tensors["b"]
        assert (info.shape, info.dtype, info.num_bytes, checkpoint.dtype) == ((6,), "float32", 24, "float32")
        np.testing.assert_array_equal(checkpoint.read("b"), SIX)
    with pytest.raises(VLLMValidationError, match=r"no \.safetensors files .* there is pytorch_model\.bin"):
        open_checkpoint(str(folder), load_format="safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(VLLMValidationError, match=r"pytorch_model\.bin: it is no zip file"):
        open_checkpoint(str(folder))


def test_several_files_with_an_index(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name, file_name in zip("ab", names, strict=True):
        write(tmp_path / file_name, torch_bytes({name: SIX}))
    (tmp_path / "training_args.bin").write_bytes(b"x")
    assert set(open_checkpoint(str(tmp_path)).tensors) == {"a", "b"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    assert set(open_checkpoint(str(tmp_path)).tensors) == {"a", "b"}
    (tmp_path / names[1]).unlink()
    with pytest.raises(VLLMValidationError, match=r"pytorch_model\.bin\.index\.json names .*, which are not there"):
        open_checkpoint(str(tmp_path))


def test_an_adapter(tmp_path: Path):
    base = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    down, up = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 6), (5, 4)))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    write(tmp_path / "adapter_model.bin", torch_bytes({f"{base}A.weight": down, f"{base}B.weight": up}))
    matrices = PeftAdapter(tmp_path, 8).read("model.layers.0.self_attn.q_proj")
    np.testing.assert_array_equal(matrices.down, down)
    np.testing.assert_array_equal(matrices.up, up * np.float32(2))
