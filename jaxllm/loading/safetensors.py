"""Read safetensors files: the header is checked in full, tensors are views of the mapped file.

Any malformed file is a ValueError. Files are untrusted: no size in them is allocated unchecked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.loading.mapped_file import FileSpan, MappedFile

_MAX_HEADER_BYTES = 100_000_000
"""The largest header, in bytes; the same limit as in the format's own reader."""
_MAX_ENTRY_BYTES = 4096
"""The longest header entry of one tensor: a list of millions of sizes would take more memory than the file."""

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor's entry in the header; offsets count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `start` counts from the end of the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def _header_size(first_bytes: bytes, file_size: int) -> int:
    """Return the number of header bytes after the first eight."""
    if len(first_bytes) < 8:
        raise ValueError("not a safetensors file: shorter than the 8 bytes of the header's size")
    size = int.from_bytes(first_bytes[:8], "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"not a safetensors file: it declares a header of {size} bytes, over {_MAX_HEADER_BYTES}")
    if size > file_size - 8:
        raise ValueError(f"the header needs {size + 8} bytes but the file has {file_size}: it is cut short or corrupt")
    return size


def _parse_header(header: bytes, data_size: int) -> dict[str, Entry]:
    """Parse the header's JSON, and check that its tensors tile the `data_size` bytes after it exactly."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: _entry(name, value) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the safetensors header cannot be read: {error}") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            fault = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise ValueError(f"tensor {name!r} starts at byte {entry.start}, which {fault} (expected {end})")
        end += entry.num_bytes
    if end != data_size:
        raise ValueError(f"the tensors need {end} bytes but {data_size} follow the header: cut short or corrupt")
    return entries


def _entry(name: str, raw: msgspec.Raw) -> Entry:
    """Parse one tensor's entry, and check its dtype, shape and byte range against each other."""
    if memoryview(raw).nbytes > _MAX_ENTRY_BYTES:
        raise ValueError(f"the entry of tensor {name!r} is longer than {_MAX_ENTRY_BYTES} bytes")
    entry = msgspec.json.decode(raw, type=_Entry)
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"tensor {name!r} has dtype {entry.dtype!r}; known are {', '.join(DTYPES)}")
    if any(size < 0 for size in entry.shape) or len(entry.shape) > 32:
        raise ValueError(f"tensor {name!r} has shape {entry.shape}")
    start, stop = entry.data_offsets
    # Python integers do not overflow, so a huge shape simply does not fit its range.
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    if start < 0 or stop - start != num_bytes:
        raise ValueError(
            f"tensor {name!r} {entry.dtype} {entry.shape} takes {num_bytes} bytes, not the range {start} to {stop}"
        )
    return Entry(dtype, tuple(entry.shape), start, num_bytes)


def read_one(data: bytes) -> np.ndarray:
    """Return the only tensor of a file's bytes, as a read-only view. Raises ValueError for malformed bytes, and for
    another number of tensors.
    """
    start = 8 + _header_size(data[:8], len(data))
    entries = list(_parse_header(data[8:start], len(data) - start).values())
    if len(entries) != 1:
        raise ValueError(f"the file has {len(entries)} tensors, expected 1")
    return np.frombuffer(data, np.uint8, offset=start).view(entries[0].dtype).reshape(entries[0].shape)


class SafetensorsFile:
    """One mapped safetensors file. Raises ValueError if it is malformed, OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        size = _header_size(self._file.bytes[:8].tobytes(), self._file.size)
        self._data_start = 8 + size
        header = self._file.view(8, size).tobytes()
        self.entries = _parse_header(header, self._file.size - self._data_start)

    def read(self, name: str) -> np.ndarray:
        """Return a read-only view of the tensor; nothing is copied."""
        entry = self.entries[name]
        return self._file.view(self._data_start + entry.start, entry.num_bytes).view(entry.dtype).reshape(entry.shape)

    def span(self, name: str) -> FileSpan:
        """Return where the tensor's bytes are."""
        entry = self.entries[name]
        return FileSpan(self._file.path, self._data_start + entry.start, entry.num_bytes)

    def release(self, name: str) -> None:
        """Release the tensor's pages."""
        span = self.span(name)
        self._file.drop(span.start, span.num_bytes)
