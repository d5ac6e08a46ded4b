"""Write records of results to a file: JSON lines, a JSON array, a numpy matrix, or a Parquet table."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import batched
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.streams import writing

WAY_OUT = "make room and start the same command again: what is done is kept"
GROUP_ROWS = 8192
"""The number of rows in a row group of a Parquet file, which are in memory together."""

type Write = Callable[[BinaryIO, Iterator[bytes]], None]
"""A function that writes records, each a JSON object, to a file."""
type Opens = Callable[[Path], AbstractContextManager[BinaryIO]]
"""A function that opens the file of a path to replace its content."""


class Row(msgspec.Struct):
    """A record of a vector, or of an error, for a file that is not JSON."""

    index: int
    id: Any = None
    text: str | None = None
    num_prompt_tokens: int | None = None
    label: str | None = None
    vector: bytes | None = None
    """Little-endian float32 numbers; None if there is an error."""
    error: str | None = None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces another in one move, once it is complete. Raises OutputError."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path, WAY_OUT):
        try:
            with temporary.open("wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(path)


@contextmanager
def overwriting(path: Path) -> Iterator[BinaryIO]:
    """Open a file and overwrite it: links to it, and programs that have it open, see the new content.

    Raises OutputError.
    """
    with writing(path, WAY_OUT), path.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


def write_lines(out: BinaryIO, records: Iterator[bytes]) -> None:
    """Write one record per line."""
    for record in records:
        out.write(record + b"\n")


def write_array(out: BinaryIO, records: Iterator[bytes]) -> None:
    """Write one array with one line per element."""
    out.write(b"[\n")
    for position, record in enumerate(records):
        out.write((b",\n" if position else b"") + record)
    out.write(b"\n]\n")


def write_npy(out: BinaryIO, records: Iterator[bytes], *, num_rows: int, errors: Path) -> None:
    """Write a float32 array [num_rows, d]; the record of an error becomes a row of NaN.

    Records of errors go into a separate file, which exists only if there are any.
    """
    import numpy as np

    def begin(width: int) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, width)}
        np.lib.format.write_array_header_1_0(out, header)

    decoder = msgspec.json.Decoder(Row)
    failed: list[bytes] = []
    no_number = b""  # a row of NaN, once its width is known
    for record in records:
        vector = decoder.decode(record).vector
        if vector is None:
            failed.append(record)
            out.write(no_number)
            continue
        if not no_number:
            begin(len(vector) // 4)
            no_number = np.full(len(vector) // 4, np.nan, "<f4").tobytes()
            out.write(no_number * len(failed))
        out.write(vector)
    if not no_number:
        begin(0)
    if failed:
        with replacing(errors) as file:
            write_lines(file, iter(failed))
    else:
        errors.unlink(missing_ok=True)


def require_pyarrow(output: str) -> None:
    """Raise VLLMValidationError, with the way to install it, if pyarrow is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        message = f"--output {output}: .parquet needs pyarrow: pip install 'jaxllm[parquet]'."
        raise VLLMValidationError(message, parameter="output", value=output)


def write_parquet(out: BinaryIO, records: Iterator[bytes], *, vector: str, has_labels: bool) -> None:
    """Write a table with a row for each record; `vector` names the column of vectors, lists of float32.

    An id that is not a string is written as JSON. The vector of an error is null.
    """
    import numpy as np

    pyarrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    text = pyarrow.string()
    columns = {"index": pyarrow.int64(), "id": text, "text": text, "num_prompt_tokens": pyarrow.int64()}
    columns |= {"label": text} if has_labels else {}
    columns |= {vector: pyarrow.list_(pyarrow.float32()), "error": text}
    schema = pyarrow.schema(list(columns.items()))
    decoder = msgspec.json.Decoder(Row)
    with parquet.ParquetWriter(out, schema) as writer:
        for rows in batched(map(decoder.decode, records), GROUP_ROWS):
            values = {name: [getattr(row, name) for row in rows] for name in columns if name not in (vector, "id")}
            values["id"] = [None if row.id is None else _id(row.id) for row in rows]
            values[vector] = [None if row.vector is None else np.frombuffer(row.vector, "<f4") for row in rows]
            writer.write_table(pyarrow.table({name: values[name] for name in columns}, schema=schema))


def _id(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
