"""Keep results in a file from which a killed run resumes, and merge them in input order at the end."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from jaxllm.cli.batch.result_files import WAY_OUT, Opens, Write, replacing, write_lines
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.utils.streams import writing


class _Entry(msgspec.Struct):
    index: int
    key: str
    record: msgspec.Raw


_LINE_ENDS = ("\u0085", "\u2028", "\u2029")
"""Line ends for str.splitlines that JSON does not escape."""


def _encode(record: dict[str, Any]) -> bytes:
    """Return the record as one line of JSON, by every definition of a line."""
    line = msgspec.json.encode(record)
    for end in _LINE_ENDS:
        line = line.replace(end.encode(), b"\\u%04x" % ord(end))
    return line


def output_path(name: str, source: str | None, suffixes: Sequence[str] = (), flag: str = "output") -> Path:
    """Return the path for a run's results; its name must end in one of `suffixes`, if there are any.

    Raises VLLMValidationError for a path that cannot be written, and for the input file itself.
    """
    try:
        output = Path(name).expanduser()
        fault = _fault(output, source, suffixes)
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a name that is too long, a loop of links
        message = f"--{flag} {shown(name)}: {error}."
        raise VLLMValidationError(message, parameter=flag.replace("-", "_"), value=name) from error
    if fault is not None:
        raise VLLMValidationError(f"--{flag} {shown(name)}: {fault}.", parameter=flag.replace("-", "_"), value=name)
    return output


def _fault(output: Path, source: str | None, suffixes: Sequence[str]) -> str | None:
    """Return why a file cannot take the results; None if no problem is visible."""
    if suffixes and output.suffix not in suffixes:
        return f"it must be a {' or '.join(suffixes)} file"
    if not output.parent.is_dir():
        return f"there is no folder {output.parent}"
    if output.is_dir():
        return "it is a folder; name a file"
    if source and output.resolve() == Path(source).expanduser().resolve():
        return "it must not be the input file"
    return None


class Journal:
    """Keeps finished records next to the output file, one JSON line each; only one run at a time may hold it.

    On resume, a record counts if the prompt at its index still has the same key.
    """

    is_silent = True
    """Whether nothing is printed while results arrive, so that a progress bar is shown."""

    def __init__(self, output: Path, keys: Sequence[str], write: Write = write_lines, opens: Opens = replacing) -> None:
        """Keep records for a file that `opens` opens and `write` fills at the end."""
        self._output, self._opens = output, opens
        self._keys = keys
        self._write = write
        self.path = output.with_name(output.name + ".partial.jsonl")
        self._places: dict[int, tuple[int, int]] = {}
        self._failed: dict[int, bytes] = {}

    def __enter__(self) -> Self:
        try:
            self._file: BinaryIO = self.path.open("a+b")
        except OSError as error:
            message = f"--output {self._output}: cannot write {self.path.name} beside it: {error.strerror}."
            raise VLLMValidationError(message, parameter="output", value=str(self._output)) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            message = f"another run is writing {self.path}; wait for it or choose another --output."
            raise VLLMValidationError(message, parameter="output", value=str(self._output)) from error
        self._load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()  # nothing to resume from, as when the model could not be loaded
        with suppress(OSError):  # from a record that could not be written
            self._file.close()

    def _load(self) -> None:
        """Load the valid records, and cut off a line that a kill left unfinished."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self._remember(line, end)
            end += len(line)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def _remember(self, line: bytes, start: int) -> None:
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except msgspec.DecodeError:
            return
        if 0 <= entry.index < len(self._keys) and entry.key == self._keys[entry.index]:
            self._places[entry.index] = (start, len(line))

    @property
    def done(self) -> frozenset[int]:
        """Return the indices of the prompts with a result."""
        return frozenset(self._places)

    def put(self, index: int, record: dict[str, Any]) -> None:
        """Store a prompt's result; from now on it survives a kill of this process."""
        raw = msgspec.Raw(_encode(record))
        line = msgspec.json.encode(_Entry(index, self._keys[index], raw)) + b"\n"
        start = self._file.tell()
        with writing(self.path, WAY_OUT):
            self._file.write(line)
            self._file.flush()
        self._places[index] = (start, len(line))

    def fail(self, index: int, record: dict[str, Any]) -> None:
        """Store a prompt's error for the output only: a resumed run retries the prompt."""
        self._failed[index] = _encode(record)

    def finish(self) -> None:
        """Write the output file in input order, and remove the journal."""
        with self._opens(self._output) as out:
            self._write(out, self._records())
        with writing(self.path):
            self.path.unlink()

    def _records(self) -> Iterator[bytes]:
        for index in range(len(self._keys)):
            if index in self._failed:
                yield self._failed[index]
            else:
                start, length = self._places[index]
                self._file.seek(start)
                yield bytes(msgspec.json.decode(self._file.read(length), type=_Entry).record)


class Console:
    """Prints results to standard output in input order, each as soon as all earlier ones are printed."""

    is_silent = False

    def __init__(self, num_prompts: int, stream: Any) -> None:
        self._num_prompts = num_prompts
        self._stream = stream
        self._waiting: dict[int, str] = {}
        self._next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def done(self) -> frozenset[int]:
        """Return no index: earlier runs leave nothing."""
        return frozenset()

    def put(self, index: int, record: dict[str, Any]) -> None:
        """Print a prompt's outputs."""
        texts = [output["text"] for output in record["outputs"]]
        asked = record["messages"][-1].get("content") if "messages" in record else record["prompt"]
        self._show(index, asked, texts)

    def fail(self, index: int, record: dict[str, Any]) -> None:
        """Print a prompt's error."""
        self._show(index, None, ["error: " + record["error"]])

    def _show(self, index: int, prompt: Any, texts: list[str]) -> None:
        alone = self._num_prompts == 1 and len(texts) == 1
        title = f"[{index}]" if prompt is None else f"[{index}] {prompt!r}"
        lines = texts if alone else [title, *(f"  -> {text!r}" for text in texts)]
        self._waiting[index] = "\n".join(lines) + "\n"
        while self._next in self._waiting:
            with writing("standard output"):
                self._stream.write(self._waiting.pop(self._next))
                self._stream.flush()
            self._next += 1

    def finish(self) -> None:
        """Do nothing: everything has been printed."""
