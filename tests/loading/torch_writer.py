"""A writer of torch.save's files, written for the tests: it shares no code with the reader, or with PyTorch."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

STORAGES = {
    "bool": "Bool",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
}


class Name(NamedTuple):
    """A global."""

    module: str
    name: str


class Call(NamedTuple):
    """A function and its arguments."""

    function: Name
    arguments: tuple[Any, ...]


class Storage(NamedTuple):
    """A storage by its persistent id."""

    kind: Name
    key: str
    size: int


REBUILD, DICT = Name("torch._utils", "_rebuild_tensor_v2"), Call(Name("collections", "OrderedDict"), ())


def code(value: Any) -> bytes:
    """Return the opcodes of protocol 2 that leave a value on the stack."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case Name():
            return b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
        case Call():
            return code(value.function) + code(value.arguments) + b"R"
        case Storage():
            return code(("storage", value.kind, value.key, "cpu", value.size)) + b"Q"
        case tuple():
            return b"(" + b"".join(map(code, value)) + b"t"
        case list():
            return b"](" + b"".join(map(code, value)) + b"e"
        case dict():
            return b"}(" + b"".join(code(key) + code(item) for key, item in value.items()) + b"u"
    raise TypeError(value)


def tensor(storage: Storage, shape: tuple[Any, ...], strides: tuple[Any, ...] | None = None, offset: Any = 0) -> Call:
    """Return the call that rebuilds a tensor; its strides are those of C order by default."""
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Call(REBUILD, (storage, offset, shape, strides, False, DICT))


def storage_of(array: np.ndarray, key: str) -> Storage:
    """Return the storage of an array's numbers."""
    return Storage(Name("torch", f"{STORAGES[array.dtype.name]}Storage"), key, array.size)


def zip_bytes(
    pickle: bytes,
    storages: Mapping[str, bytes],
    *,
    compression: int = zipfile.ZIP_STORED,
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> bytes:
    """Return the zip file around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("model/data.pkl", pickle)
        for key, data in ({f"data/{key}": data for key, data in storages.items()} | dict(more)).items():
            archive.writestr(f"model/{key}", data)
    return file.getvalue()


def program(value: Any) -> bytes:
    """Return a whole pickle."""
    return b"\x80\x02" + code(value) + b"."


def torch_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return a file with a state dict, each tensor with a storage of its own."""
    arrays = dict(enumerate(tensors.values()))
    values = [tensor(storage_of(array, str(key)), array.shape) for key, array in arrays.items()]
    pickle = program(dict(zip(tensors, values, strict=True)))
    return zip_bytes(pickle, {str(key): array.tobytes() for key, array in arrays.items()})
