"""Read one array from the bytes of a .npy file or of a tensor that torch.save wrote, without running anything in them.

A saved tensor is a zip archive of a pickle and the tensor's numbers. The pickle is walked as data: it may do no more
than name a dense tensor. Nothing is allocated by a size that a header claims.
"""

from __future__ import annotations

import pickletools
import zipfile
from io import BytesIO
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from jaxllm.media.errors import MediaError

_MAX_PICKLE = 4096
"""The most bytes of a pickle; that of a tensor has some 300."""
_MAX_MEMBERS = 16
"""The most files of an archive."""
_MAX_AXES = 3
_MAX_KEY = 64
"""The most characters of the name of a storage; torch counts from 0."""
_BFLOAT16 = "bfloat16"
_STORAGES: dict[str, str] = {
    "torch FloatStorage": "<f4",
    "torch HalfStorage": "<f2",
    "torch DoubleStorage": "<f8",
    "torch BFloat16Storage": _BFLOAT16,
    "torch LongStorage": "<i8",
    "torch IntStorage": "<i4",
}
"""The types of numbers of saved tensors."""
_REBUILD = "torch._utils _rebuild_tensor_v2"
_FORMS = "send a dense tensor of floats by torch.save, or an array by numpy.save"
_CONSTANTS: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}
_LITERALS = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "GLOBAL")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_SCALARS = (int, str, bool, type(None))


class _Call(NamedTuple):
    """A call in a pickle, which is not made."""

    function: str
    arguments: tuple[Any, ...]


class _Saved(NamedTuple):
    """The identity of a storage in a pickle."""

    parts: tuple[int | str | None, ...]


def read_tensor(data: bytes) -> np.ndarray:
    """Return the array of a file: float64, float32, float16 (float32 where it was bfloat16), int64 or int32.

    Raises MediaError for other files, for damaged ones, and for tensors that are sparse or not contiguous.
    """
    try:
        return read_npy(data) if data.startswith(npy.MAGIC_PREFIX) else _read_saved(data)
    except MediaError:
        raise
    except Exception as error:  # the readers of numpy, zip archives and pickles raise errors of many kinds
        raise MediaError(f"the embeddings are damaged or of another format: {_FORMS}.") from error


def read_npy(data: bytes) -> np.ndarray:
    """Return the array of a .npy file, never one of objects. Raises MediaError, or what numpy's reader raises."""
    stream = BytesIO(data)
    version = npy.read_magic(stream)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream)
    if dtype.str not in _STORAGES.values() or is_fortran:
        raise MediaError(f"an array of type {dtype} in that order of axes is not read: save floats, with rows first.")
    return _shaped(data[stream.tell() :], dtype.str, shape)


def _read_saved(data: bytes) -> np.ndarray:
    # An object would be made for each file of an archive that has many.
    if data.count(b"PK\x01\x02") > _MAX_MEMBERS:
        raise MediaError(f"the archive has too many files for a tensor: {_FORMS}.")
    with zipfile.ZipFile(BytesIO(data)) as archive:
        members = archive.infolist()
        [pickle] = [member for member in members if member.filename.endswith("/data.pkl")]
        if any(member.compress_type for member in members):
            raise MediaError(f"a saved tensor is not compressed: {_FORMS}.")
        if pickle.file_size > _MAX_PICKLE:
            raise MediaError(f"the saved object is no plain tensor: {_FORMS}.")
        prefix = pickle.filename.removesuffix("data.pkl")
        orders = [archive.read(member) for member in members if member.filename == f"{prefix}byteorder"]
        if orders not in ([], [b"little"]):
            raise MediaError("the saved tensor has its bytes in another order than little-endian.")
        storage, offset, shape, strides = _tensor_of(_walk(archive.read(pickle)))
        code, key = _storage_of(storage)
        numbers = archive.read(f"{prefix}data/{key}")
    _check_axes(shape)
    if not _is_contiguous(shape, strides):
        raise MediaError("the saved tensor is not contiguous: save tensor.contiguous().")
    size = _item_size(code)
    return _shaped(numbers[offset * size : (offset + prod(shape)) * size], code, shape)


def _tensor_of(value: Any) -> tuple[_Saved, int, tuple[int, ...], tuple[int, ...]]:
    """Return a dense tensor's storage, offset, shape and strides. Raises MediaError for any other object."""
    if isinstance(value, _Call) and value.function == _REBUILD:
        storage, offset, shape, strides, *_ = value.arguments
        if isinstance(storage, _Saved) and all(_is_count(number) for number in (offset, *shape, *strides)):
            return storage, offset, shape, strides
    raise MediaError(f"the saved object is no dense tensor: {_FORMS}.")


def _storage_of(saved: _Saved) -> tuple[str, str]:
    """Return the type of a storage's numbers and the name of its file. Raises MediaError for those torch has not."""
    mark, kind, key, *_ = saved.parts
    if mark != "storage" or type(key) is not str or len(key) > _MAX_KEY:
        raise MediaError(f"the saved object is no dense tensor: {_FORMS}.")
    if type(kind) is not str or kind not in _STORAGES:
        raise MediaError(f"the saved tensor has numbers of another type than floats: {_FORMS}.")
    return _STORAGES[kind], key


def _walk(pickle: bytes) -> Any:
    """Return what a pickle names, with its calls as `_Call`. Raises MediaError for an operation of another kind."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(pickle):
        name = operation.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _TUPLES or name == "TUPLE":
            start = marks.pop() if name == "TUPLE" else len(stack) - _TUPLES[name]
            stack[start:] = [_checked(tuple(stack[start:]))]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "BINPERSID":
            stack.append(_checked(_Saved(stack.pop())))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_checked(_Call(stack.pop(), arguments)))
        elif name not in ("PROTO", "STOP"):
            raise MediaError(f"the saved object is no plain tensor: {_FORMS}.")
    [value] = stack
    return value


def _checked[Node: tuple[Any, ...]](node: Node) -> Node:
    """Return a tuple, storage or call as saved tensors have them. Raises MediaError for others.

    This bounds how deep they nest: one that is twice in the next, and so on, would take exponential time to compare.
    """
    if isinstance(node, _Saved):
        is_known = type(node.parts) is tuple and all(type(part) in _SCALARS for part in node.parts)
    elif isinstance(node, _Call):
        is_known = type(node.function) is str and type(node.arguments) is tuple
    else:
        is_known = all(_may_be_in_tuple(entry) for entry in node)
    if not is_known:
        raise MediaError(f"the saved object is no dense tensor: {_FORMS}.")
    return node


def _may_be_in_tuple(value: Any) -> bool:
    """Return whether a value is a scalar, a tuple of integers, a storage, or a call without arguments."""
    if isinstance(value, _Call):
        return not value.arguments
    if type(value) is tuple:
        return all(type(entry) is int for entry in value)
    return isinstance(value, _Saved) or type(value) in _SCALARS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether numbers lie one after the other; the stride of an axis with one entry means nothing."""
    expected = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    pairs = zip(shape, strides, expected, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def _item_size(code: str) -> int:
    return 2 if code == _BFLOAT16 else np.dtype(code).itemsize


def _check_axes(shape: tuple[int, ...]) -> None:
    if len(shape) > _MAX_AXES:
        raise MediaError(f"the embeddings have {len(shape)} axes, and there may be {_MAX_AXES} at most.")


def _shaped(numbers: bytes, code: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers in a shape. Raises MediaError unless there are as many as the shape has places."""
    _check_axes(shape)
    if prod(shape) * _item_size(code) != len(numbers):
        raise MediaError(f"the embeddings of shape {list(shape)} do not have as many numbers.")
    if code == _BFLOAT16:
        return (np.frombuffer(numbers, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(numbers, code).reshape(shape)
