"""Read a file of torch.save: a zip file with a pickle, and with one uncompressed entry for each storage.

Tensors are views of the mapped file. Any malformed file is a ValueError, and no code in a file is ever run.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllm.loading.mapped_file import FileSpan, MappedFile
from jaxllm.loading.torch_files.state_dict import StoredTensor, read_state_dict
from jaxllm.params.checks import shown

_PICKLE, _BYTE_ORDER, _STORAGE = "data.pkl", "byteorder", "data/"
_LOCAL_HEADER, _LOCAL_MARK = 30, b"PK\3\4"
"""The size in bytes of the header before an entry, without the name and the extra field, and how it starts."""
_OLD_MARK = b"\x80\x02\x8a\x0a"
"""The first bytes of a file that PyTorch wrote without zip, as before 1.6."""
_WAY_OUT = "in PyTorch, save it again: torch.save(torch.load(path, weights_only=True), path)"


class TorchFile:
    """One mapped file of torch.save. Raises ValueError if it is malformed, OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        if self._file.bytes[:4].tobytes() == _OLD_MARK:
            raise ValueError(f"it is a pickle without zip, as PyTorch wrote before 1.6; {_WAY_OUT}")
        self._archive = _read_directory(path)
        if _PICKLE not in self._archive or "constants.pkl" in self._archive:
            raise ValueError(f"it is a zip file, but not of a state dict; {_WAY_OUT}")
        order = self._entry(_BYTE_ORDER).tobytes() if _BYTE_ORDER in self._archive else b"little"
        if order != b"little":
            raise ValueError(f"its byte order is {shown(order)}, which is not supported, only little")
        self.entries: Mapping[str, StoredTensor] = read_state_dict(self._entry(_PICKLE), self._storage_size)

    def read(self, name: str) -> np.ndarray:
        """Return the tensor as a read-only view of the file, or a copy where its numbers do not lie in order."""
        tensor = self.entries[name]
        if 0 in tensor.shape:
            return np.empty(tensor.shape, tensor.dtype)
        size, stored = tensor.dtype.itemsize, self._entry(_STORAGE + tensor.storage)
        strides = [size * stride for stride in tensor.strides]
        view = np.ndarray(tensor.shape, tensor.dtype, stored.data, size * tensor.offset, strides)
        return np.ascontiguousarray(view).reshape(tensor.shape)

    def span(self, name: str) -> FileSpan:
        """Return where the bytes of the tensor's storage are."""
        return self._span(_STORAGE + self.entries[name].storage)

    def release(self, name: str) -> None:
        """Release the pages of the tensor's storage."""
        span = self.span(name)
        self._file.drop(span.start, span.num_bytes)

    def _storage_size(self, key: str) -> int | None:
        entry = self._archive.get(_STORAGE + key)
        return None if entry is None else len(self._entry(_STORAGE + key))

    def _entry(self, name: str) -> np.ndarray:
        """Return the bytes of one entry of the zip file. Raises ValueError if it is compressed or not in the file."""
        span = self._span(name)
        return self._file.view(span.start, span.num_bytes)

    def _span(self, name: str) -> FileSpan:
        entry = self._archive[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise ValueError(f"its entry {shown(name)} is compressed or encrypted; {_WAY_OUT}")
        header = self._file.view(entry.header_offset, _LOCAL_HEADER).tobytes()
        if not header.startswith(_LOCAL_MARK):
            raise ValueError(f"its entry {shown(name)} is not where the zip file's directory says: corrupt")
        sizes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return FileSpan(self._file.path, entry.header_offset + _LOCAL_HEADER + sizes, entry.file_size)


def _read_directory(path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return a zip file's entries by their names, without the folder that all of them are in."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"it is no zip file as torch.save writes: cut short or corrupt ({error})") from None
    folder = next((info.filename.partition("/")[0] for info in infos if info.filename.endswith(f"/{_PICKLE}")), "")
    return {info.filename.removeprefix(f"{folder}/"): info for info in infos}
