"""Read the pickle of a state dict: names, dtypes, shapes and strides of tensors, and where their numbers are.

A pickle is a program for a stack machine that can call any Python function. This machine knows only the opcodes that
torch.save writes, and calls nothing: the functions that rebuild tensors are names to it, and other names are refused.
"""

from __future__ import annotations

import math
import pickletools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.params.checks import shown

_MAX_BYTES = 32 << 20
"""The largest pickle, in bytes; one tensor takes about 130."""
_MAX_AXES = 32

_DTYPES: Mapping[str, np.dtype] = {
    "torch.bool": np.dtype(np.bool_),
    "torch.uint8": np.dtype(np.uint8),
    "torch.int8": np.dtype(np.int8),
    "torch.uint16": np.dtype(np.uint16),
    "torch.int16": np.dtype(np.int16),
    "torch.uint32": np.dtype(np.uint32),
    "torch.int32": np.dtype(np.int32),
    "torch.uint64": np.dtype(np.uint64),
    "torch.int64": np.dtype(np.int64),
    "torch.float16": np.dtype(np.float16),
    "torch.bfloat16": np.dtype(ml_dtypes.bfloat16),
    "torch.float32": np.dtype(np.float32),
    "torch.float64": np.dtype(np.float64),
    "torch.float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "torch.float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "torch.float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_STORAGES: Mapping[str, np.dtype | None] = {
    "torch.BoolStorage": _DTYPES["torch.bool"],
    "torch.ByteStorage": _DTYPES["torch.uint8"],
    "torch.CharStorage": _DTYPES["torch.int8"],
    "torch.ShortStorage": _DTYPES["torch.int16"],
    "torch.IntStorage": _DTYPES["torch.int32"],
    "torch.LongStorage": _DTYPES["torch.int64"],
    "torch.HalfStorage": _DTYPES["torch.float16"],
    "torch.BFloat16Storage": _DTYPES["torch.bfloat16"],
    "torch.FloatStorage": _DTYPES["torch.float32"],
    "torch.DoubleStorage": _DTYPES["torch.float64"],
    "torch.storage.UntypedStorage": None,
}
"""The dtype of each type of storage; None for bytes, where tensors state their own."""
_DICT = "collections.OrderedDict"
_TENSOR, _TYPED_TENSOR = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER, _STATEFUL_PARAMETER = "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"
_NUM_ARGUMENTS = {_DICT: (0,), _TENSOR: (6, 7), _TYPED_TENSOR: (7, 8), _PARAMETER: (3,), _STATEFUL_PARAMETER: (4,)}
"""The functions that a state dict is made with, and the numbers of arguments that they take."""
_NAMES = {*_DTYPES, *_STORAGES, *_NUM_ARGUMENTS}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a view of a storage; `strides` and `offset` count numbers, not bytes."""

    storage: str
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's numbers in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Name:
    """A global that the pickle names, such as a function, a dtype or a type of storage."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: np.dtype | None
    num_bytes: int


def read_state_dict(pickle: np.ndarray, storage_size: Callable[[str], int | None]) -> dict[str, StoredTensor]:
    """Return the tensors of a pickled state dict, given as uint8, by name.

    `storage_size` returns a storage's size in bytes by its key, None if there is no such storage. Raises ValueError for
    a malformed pickle, for one that holds anything but tensors, and for tensors that do not fit their storages.
    """
    if len(pickle) > _MAX_BYTES:
        raise ValueError(f"its pickle has {len(pickle)} bytes, over {_MAX_BYTES}: it is no state dict")
    try:
        with warnings.catch_warnings():
            # Python warns of a name with an unknown escape, which is refused as a name.
            warnings.simplefilter("ignore", DeprecationWarning)
            value = _Machine(storage_size).run(pickle.tobytes())
    except (IndexError, KeyError) as error:
        raise ValueError(f"its pickle is corrupt ({error!r})") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {_described(value)}, not a state dict; save model.state_dict() alone")
    for name, tensor in value.items():
        if not isinstance(tensor, StoredTensor):
            raise ValueError(f"{shown(name)} in it is {_described(tensor)}, no tensor; save model.state_dict() alone")
    return value


class _Machine:
    """The stack machine. Its values are Python's own, tensors, storages and names."""

    def __init__(self, storage_size: Callable[[str], int | None]) -> None:
        self._storage_size = storage_size
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        """Run the program and return the value that it leaves."""
        for name, argument in _opcodes(pickle):
            if name in _VALUES:
                self._stack.append(_VALUES[name](argument))
            elif name in _STEPS:
                _STEPS[name](self, argument)
            else:
                raise ValueError(f"its pickle has the opcode {name}, which no state dict needs")
        return self._stack.pop()

    def mark(self, _argument: object) -> None:
        self._marks.append(len(self._stack))

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def tuple_of(self, count: int | None) -> None:
        """Replace the last values by a tuple of them: `count`, or all after the mark."""
        self._stack.append(tuple(self._pop_many(count)))

    def append(self, count: int | None) -> None:
        values = self._pop_many(count)
        _expect(self._stack[-1], list).extend(values)

    def set_items(self, count: int | None) -> None:
        pairs = self._pop_many(count)
        items = _expect(self._stack[-1], dict)
        for i in range(0, len(pairs), 2):
            items[_expect(pairs[i], str)] = pairs[i + 1]

    def build(self, _argument: object) -> None:
        """Drop the attributes of a dict: PyTorch keeps the versions of modules there."""
        self._stack.pop()
        _expect(self._stack[-1], dict)

    def name(self, argument: str) -> None:
        """Push a name. One that no tensor is made with is refused."""
        name = argument.replace(" ", ".", 1)
        if name not in _NAMES:
            raise ValueError(
                f"its pickle names {shown(name)}, which no tensor is made with and which could run any code, so it is "
                "refused; save model.state_dict() alone"
            )
        self._stack.append(_Name(name))

    def reduce(self, _argument: object) -> None:
        """Replace a function's name and its arguments by the tensor, or the empty dict, that it would return."""
        arguments, name = _expect(self._stack.pop(), tuple), _expect(self._stack.pop(), _Name).name
        if len(arguments) not in _NUM_ARGUMENTS.get(name, ()):
            raise ValueError(f"its pickle calls {name} with {len(arguments)} arguments")
        if name == _DICT:
            made = {}
        elif name in (_PARAMETER, _STATEFUL_PARAMETER):
            made = _expect(arguments[0], StoredTensor)
        else:
            made = _tensor(arguments, has_dtype=name == _TYPED_TENSOR)
        self._stack.append(made)

    def find_storage(self, _argument: object) -> None:
        """Replace a persistent id by the storage that it names."""
        kind, name, key, _device, count = _expect(self._stack.pop(), tuple)
        name, key, count = _expect(name, _Name).name, _expect(key, str), _expect(count, int)
        if kind != "storage" or name not in _STORAGES:
            raise ValueError(f"its pickle has a storage of the type {name}")
        dtype = _STORAGES[name]
        num_bytes = count * (1 if dtype is None else dtype.itemsize)
        size = self._storage_size(key)
        if size != num_bytes:
            holds = "is not there" if size is None else f"has {size} bytes"
            raise ValueError(f"storage {shown(key)} {holds}, expected {num_bytes}: the file is cut short or corrupt")
        self._stack.append(_Storage(key, dtype, num_bytes))

    def _pop_many(self, count: int | None) -> list[Any]:
        """Take the last `count` values from the stack, or all after the last mark."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        if not 0 <= start <= len(self._stack):
            raise IndexError("the stack is too short")
        values = self._stack[start:]
        del self._stack[start:]
        return values


def _opcodes(pickle: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the opcodes before STOP by name, with their arguments."""
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "STOP":
                return
            yield opcode.name, argument
    except ValueError as error:
        raise ValueError(f"its pickle is corrupt: {error}") from None


def _tensor(arguments: Sequence[Any], *, has_dtype: bool) -> StoredTensor:
    """Make a tensor from the arguments of PyTorch's function, checked against its storage's size."""
    storage = _expect(arguments[0], _Storage)
    offset, shape, strides = _expect(arguments[1], int), _expect(arguments[2], tuple), _expect(arguments[3], tuple)
    dtype = _DTYPES.get(_expect(arguments[6], _Name).name) if has_dtype else storage.dtype
    if dtype is None or storage.dtype not in (None, dtype):
        raise ValueError(f"a tensor of storage {shown(storage.key)} has no dtype that fits it")
    sizes = (offset, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > _MAX_AXES or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"a tensor has shape {shown(shape)}, strides {shown(strides)} and offset {shown(offset)}")
    count = storage.num_bytes // dtype.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last >= count or math.prod(shape) > count):
        raise ValueError(
            f"a tensor of shape {shown(shape)}, strides {shown(strides)} and offset {shown(offset)} is larger than its "
            f"storage {shown(storage.key)} of {count} numbers"
        )
    return StoredTensor(storage.key, dtype, shape, strides, offset)


def _expect[T](value: Any, kind: type[T]) -> T:
    """Return a value that must have this very type."""
    if type(value) is not kind:
        raise ValueError(f"its pickle has {_described(value)} where a {kind.__name__.lstrip('_')} belongs")
    return value


def _described(value: Any) -> str:
    """Return the kind of a value for an error message."""
    return value.name if isinstance(value, _Name) else type(value).__name__.lstrip("_")


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"), lambda value: value),
}
"""The opcodes that push a value, made from their argument."""
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda _machine, _version: None,
    "MARK": _Machine.mark,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": lambda machine, _: machine.tuple_of(None),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append(1),
    "APPENDS": lambda machine, _: machine.append(None),
    "SETITEM": lambda machine, _: machine.set_items(2),
    "SETITEMS": lambda machine, _: machine.set_items(None),
    "GLOBAL": _Machine.name,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.find_storage,
}
"""The other opcodes of a state dict."""
