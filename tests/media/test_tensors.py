"""Arrays are read from files of numpy.save and torch.save without running what is in them, and others are refused."""

from __future__ import annotations

import base64
import io
import pickle
import time
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxllm.media.embeds.tensors import read_tensor
from jaxllm.media.errors import MediaError
from tests.media.support import golden

SAVED = golden("tensors.json")
ROWS_RW = np.arange(12, dtype=np.float32).reshape(3, 4)


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def saved(name: str) -> bytes:
    return base64.b64decode(SAVED["read"][name]["file"] if name in SAVED["read"] else SAVED["refused"][name])


def rewritten(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a saved tensor with other contents of its files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved("float32"))) as source, zipfile.ZipFile(stream, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return stream.getvalue()


def with_pickle(data: bytes) -> bytes:
    return rewritten(lambda name, old: data if name.endswith("data.pkl") else old)


@pytest.mark.parametrize("name", SAVED["read"])
def test_saved_tensors(name: str) -> None:
    array = read_tensor(saved(name))
    assert array.tolist() == SAVED["read"][name]["values"]
    assert array.dtype == {"bfloat16": "float32"}.get(name, name if "t" in name and name[-1].isdigit() else "float32")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_arrays(dtype: str) -> None:
    array = read_tensor(npy(ROWS_RW.astype(dtype)))
    assert (array.dtype, array.tolist()) == (dtype, ROWS_RW.tolist())


@pytest.mark.parametrize("name", SAVED["refused"])
def test_other_objects_are_refused(name: str) -> None:
    with pytest.raises(MediaError, match=r"embeddings are damaged|saved tensor|saved object"):
        read_tensor(saved(name))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


HUGE = npy(ROWS_RW).replace(b"(3, 4)", b"(3000000000, 4)").replace(b" " * 9 + b"\n", b"\n")
"""An array that claims to have more numbers than any memory."""
NESTED = b"\x80\x02" + b"(" * 1000 + b")" + b"t" * 1000 + b"."
LARGE_MEMO = b"\x80\x02)r\xff\xff\xff\x7f."
"""A pickle that remembers something as number 2^31 - 1, for which CPython's reader makes room."""

DOUBLED = b")" + b"q\x00h\x00\x86" * 25
"""A tuple that holds one twice, which holds one twice, and so on: to hash or write it out visits 2^25 tuples."""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no tensor",
        npy(ROWS_RW)[:-1],
        npy(ROWS_RW) + b"0",
        HUGE,
        npy(np.array([Evil()]), allow_pickle=True),
        npy(np.zeros(3, np.uint8)),
        npy(np.zeros(3, np.complex64)),
        npy(np.array(["a"])),
        npy(ROWS_RW.astype(">f4")),
        npy(np.asfortranarray(ROWS_RW)),
        npy(np.zeros((1, 1, 1, 1), np.float32)),
        saved("float32")[:-40],
        with_pickle(pickle.dumps(Evil(), 2)),
        with_pickle(b"\x80\x02."),
        with_pickle(NESTED),
        with_pickle(LARGE_MEMO),
        with_pickle(b"\x80\x02" + b"N" * 5000 + b"."),
        rewritten(lambda name, old: old[:-4] if "/data/" in name else old),
        rewritten(lambda name, old: b"big" if name.endswith("byteorder") else old),
        rewritten(lambda _, old: old, zipfile.ZIP_DEFLATED),
        b"PK\x01\x02" * 17 + saved("float32"),
    ],
)
def test_hostile_files_are_refused(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MediaError):
        read_tensor(data)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("old", "new"), [(b"K\x03K\x04\x86", b"K\x04K\x04\x86"), (b"QK\x00", b"QK\x01"), (b"QK\x00", b"QJ\xff\xff\xff\xff")]
)
def test_shapes_and_offsets_stay_within_the_numbers(old: bytes, new: bytes) -> None:
    with pytest.raises(MediaError):
        read_tensor(with_part(old, new))


def with_part(old: bytes, new: bytes) -> bytes:
    """Return a saved tensor whose pickle has another part."""

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        assert data.count(old) == 1
        return data.replace(old, new)

    return rewritten(change)


MARK, KIND, KEY = b"X\x07\0\0\0storage", b"ctorch\nFloatStorage\n", b"X\x01\0\0\x000q\x03"


@pytest.mark.parametrize("part", [MARK, KIND, KEY])
@pytest.mark.parametrize("nested", [DOUBLED, b"K\x00\x85", b"K\x00\x85Q", b"ca\nb\n)R", b"K\x00", b"N"])
def test_the_parts_of_a_storage_are_texts(part: bytes, nested: bytes) -> None:
    start = time.thread_time()
    with pytest.raises(MediaError, match=r"saved object is no|saved tensor has numbers of another type"):
        read_tensor(with_part(part, nested + b"q\x03"))
    assert time.thread_time() - start < 0.1


def test_the_name_of_a_storage_is_short() -> None:
    with pytest.raises(MediaError, match="no dense tensor"):
        read_tensor(with_part(KEY, b"X\xff\0\0\0" + b"0" * 255))


def test_shapes_have_few_axes() -> None:
    axes = b"(" + b"K\x01" * 1000 + b"t"
    with pytest.raises(MediaError, match="have 1000 axes, and there may be 3 at most"):
        read_tensor(with_part(b"K\x03K\x04\x86", axes))
