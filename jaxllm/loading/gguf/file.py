"""Read GGUF files: metadata and tensor infos are checked in full, tensor data are views of the mapped file.

Versions 2 and 3, little endian, are supported. Any malformed file is a ValueError; no size in a file is allocated
unchecked.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.loading.mapped_file import MappedFile

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type of tensors: `num_bytes` for every block of `block_size` numbers of one row."""

    name: str
    block_size: int
    num_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
_UNSUPPORTED_TYPES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor; `shape` is outermost first, as in numpy (the file has the reverse)."""

    type: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _StringArray:
    """The position of an array of strings in the file. Vocabularies are long, so it is decoded on request."""

    start: int
    num_bytes: int
    count: int

    def decode(self, file: MappedFile) -> list[str]:
        data = file.view(self.start, self.num_bytes).tobytes()
        strings: list[str] = []
        position = 0
        for _ in range(self.count):
            end = position + 8 + _U64.unpack_from(data, position)[0]
            strings.append(data[position + 8 : end].decode("utf-8"))
            position = end
        return strings


class GGUFFile:
    """One mapped GGUF file. Raises ValueError if it is malformed, OSError if it cannot be opened.

    A file that `may_be_cut` may end before its tensors do, so that what it says of itself can be read; `check_whole`
    comes before their data then.
    """

    def __init__(self, path: Path, *, may_be_cut: bool = False) -> None:
        self._file = MappedFile(path)
        reader = _Reader(self._file)
        num_tensors, num_values = reader.read_start()
        self._metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = reader.read_string()
            if key in self._metadata:
                raise ValueError(f"the metadata key {key!r} appears twice")
            self._metadata[key] = reader.read_value()
        self._metadata_bytes = reader.position
        infos = reader.read_tensor_infos(num_tensors)
        self.tensors = _place_tensors(infos, reader.position, self._alignment())
        self._holders = dict.fromkeys(self.tensors, self._file)
        if not may_be_cut:
            self.check_whole()

    def check_whole(self) -> None:
        """Raise ValueError if a tensor lies outside of its file."""
        for name, tensor in self.tensors.items():
            if tensor.start + tensor.num_bytes > self._holders[name].size:
                raise ValueError(f"tensor {name!r} reaches past the end of the file: cut short or corrupt")

    def extend(self, part: GGUFFile) -> None:
        """Add the tensors of another file. Raises ValueError for tensors that are already in this one."""
        twice = next((name for name in part.tensors if name in self.tensors), None)
        if twice is not None:
            raise ValueError(f"tensor {twice!r} is in another part too")
        self.tensors |= part.tensors
        self._holders |= part._holders

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the metadata keys, in file order."""
        return tuple(self._metadata)

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a scalar of type `kind`, or `default` if the key is absent."""
        if key not in self._metadata:
            return default
        value = self._metadata[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"the metadata key {key!r} holds {type(value).__name__}, not {kind}")
        return value

    def array(self, key: str) -> np.ndarray:
        """Return a numeric array as a read-only view of the file."""
        value = self._metadata[key]
        if not isinstance(value, np.ndarray):
            raise ValueError(f"the metadata key {key!r} is not an array of numbers")
        return value

    def is_array(self, key: str) -> bool:
        """Return whether the key holds an array, of numbers or of strings."""
        return isinstance(self._metadata.get(key), (np.ndarray, _StringArray))

    def strings(self, key: str) -> list[str]:
        """Decode an array of strings."""
        value = self._metadata[key]
        if not isinstance(value, _StringArray):
            raise ValueError(f"the metadata key {key!r} is not an array of strings")
        return value.decode(self._file)

    def metadata_digest(self) -> str:
        """Return a digest of everything but the tensors."""
        return hashlib.sha256(self._file.view(0, self._metadata_bytes)).hexdigest()

    def data(self, name: str) -> np.ndarray:
        """Return the stored bytes of a tensor, [rows, bytes per row], as a read-only view of the file."""
        tensor = self.tensors[name]
        row_bytes = tensor.shape[-1] // tensor.type.block_size * tensor.type.num_bytes
        stored = self._holders[name].view(tensor.start, tensor.num_bytes)
        return stored.reshape(math.prod(tensor.shape[:-1]), row_bytes)

    def release(self, name: str) -> None:
        """Release the tensor's pages."""
        tensor = self.tensors[name]
        self._holders[name].drop(tensor.start, tensor.num_bytes)

    def _alignment(self) -> int:
        alignment = self.value("general.alignment", int, _DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment}, not a power of two")
        return alignment


@dataclass(slots=True)
class _Reader:
    """A cursor over the file's bytes; every read is checked against the end."""

    file: MappedFile
    position: int = 0

    def read_start(self) -> tuple[int, int]:
        """Check magic and version, and return the numbers of tensors and of metadata values."""
        if self._take(4) != _MAGIC:
            raise ValueError("not a GGUF file: it does not start with the letters GGUF")
        version = self._unpack(_U32)
        if version in (2 << 24, 3 << 24):
            raise ValueError(
                "a big-endian GGUF file; only little-endian ones are supported. Convert it with gguf-py's "
                "gguf_convert_endian.py, or take a little-endian one"
            )
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported; versions 2 and 3 are")
        num_tensors, num_values = self._unpack(_U64), self._unpack(_U64)
        # Minimum sizes: a tensor info with an empty name and no dims, a value with an empty key and one byte.
        if num_tensors * 24 + num_values * 13 > self.file.size - self.position:
            raise ValueError(f"{num_tensors} tensors and {num_values} values do not fit {self.file.size} bytes")
        return num_tensors, num_values

    def read_value(self) -> Any:
        """Read a typed value: a Python scalar, a numpy view, or the position of an array of strings."""
        kind = self._unpack(_U32)
        if kind == _STRING:
            return self.read_string()
        if kind == _ARRAY:
            return self._read_array()
        if kind == _BOOL:
            return bool(self._unpack(_SCALARS[kind]))
        return self._unpack(self._scalar(kind))

    def read_string(self) -> str:
        return self._take(self._unpack(_U64)).decode("utf-8")

    def read_tensor_infos(self, count: int) -> list[tuple[str, TensorType, tuple[int, ...], int]]:
        """Read (name, type, shape outermost first, offset) for every tensor."""
        infos = []
        for _ in range(count):
            name = self.read_string()
            num_dims = self._unpack(_U32)
            if not 1 <= num_dims <= _MAX_DIMS:
                raise ValueError(f"tensor {name!r} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
            shape = tuple(self._unpack(_U64) for _ in range(num_dims))[::-1]
            kind = self._unpack(_U32)
            if kind not in TENSOR_TYPES:
                label = _UNSUPPORTED_TYPES.get(kind, f"number {kind}")
                known = ", ".join(known.name for known in TENSOR_TYPES.values())
                raise ValueError(
                    f"tensor {name!r} has the type {label}, which is not supported; supported: {known}. Take a file of "
                    "one of these, or convert this one with llama-quantize --allow-requantize"
                )
            infos.append((name, TENSOR_TYPES[kind], shape, self._unpack(_U64)))
        return infos

    def _read_array(self) -> np.ndarray | _StringArray:
        kind, count = self._unpack(_U32), self._unpack(_U64)
        if kind == _STRING:
            if count * 8 > self.file.size - self.position:
                raise ValueError(f"an array of {count} strings does not fit the file")
            start = self.position
            for _ in range(count):
                self._skip(self._unpack(_U64))
            return _StringArray(start, self.position - start, count)
        if kind == _ARRAY:
            raise ValueError("arrays of arrays are not supported")
        scalar = self._scalar(kind)
        start = self.position
        self._skip(count * scalar.size)
        dtype = np.dtype(np.bool_ if kind == _BOOL else scalar.format)
        view = self.file.view(start, count * scalar.size)
        return (view != 0) if kind == _BOOL else view.view(dtype)

    def _scalar(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind} is unknown")
        return _SCALARS[kind]

    def _unpack(self, scalar: struct.Struct) -> Any:
        start = self.position
        self._skip(scalar.size)
        return scalar.unpack_from(self.file.bytes, start)[0]

    def _take(self, num_bytes: int) -> bytes:
        start = self.position
        self._skip(num_bytes)
        return self.file.bytes[start : self.position].tobytes()

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self.file.size - self.position:
            raise ValueError(f"the file ends at byte {self.file.size}, inside of a value: cut short or corrupt")
        self.position += num_bytes


def _place_tensors(
    infos: list[tuple[str, TensorType, tuple[int, ...], int]], header_end: int, alignment: int
) -> dict[str, GGUFTensor]:
    """Check that the tensors follow each other, padded to `alignment`."""
    data_start = _align(header_end, alignment)
    tensors: dict[str, GGUFTensor] = {}
    expected = 0
    for name, kind, shape, offset in infos:
        if name in tensors:
            raise ValueError(f"tensor {name!r} appears twice")
        if shape[-1] % kind.block_size:
            raise ValueError(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {kind.name}'s {kind.block_size}")
        num_bytes = math.prod(shape) // kind.block_size * kind.num_bytes
        if offset != expected:
            raise ValueError(f"tensor {name!r} starts at offset {offset}, not at {expected} where the one before ends")
        tensors[name] = GGUFTensor(kind, shape, data_start + offset, num_bytes)
        expected = _align(offset + num_bytes, alignment)
    return tensors


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
