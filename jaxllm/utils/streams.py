"""Write to standard output and standard error, which may be closed, full, broken, or unable to encode a character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


class OutputError(Exception):
    """Results could not be written; the message has the destination, the reason, and the way out."""


@contextmanager
def writing(where: object, way_out: str = "") -> Iterator[None]:
    """Turn an OSError into an OutputError."""
    try:
        yield
    except OSError as error:
        hint = f"; {way_out}" if way_out else ""
        raise OutputError(f"cannot write {where}: {error.strerror or error}{hint}.") from error


@contextmanager
def losing_messages() -> Iterator[None]:
    """Continue if standard error cannot be written: from then on, messages are dropped."""
    try:
        yield
    except OSError:
        _lead_nowhere(sys.stderr)


def prepare_streams() -> None:
    """Make the standard streams safe to write: a closed standard error discards, and every character can be encoded.

    A closed standard output stays None, as Python makes it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next opened file gets this descriptor, and libraries' messages end up in it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:  # print(file=None) would write to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def show(text: str) -> None:
    """Write lines of results to standard output, at once. Raises OutputError."""
    with writing("standard output"):
        print(text, flush=True)  # noqa: T201


def say(text: str) -> None:
    """Write a line for the user to standard error, if possible."""
    with losing_messages():
        # In one write, since the log has its own thread.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # noqa: T201


def flush_output() -> None:
    """Flush standard output. Raises OutputError, and then keeps Python from failing again at exit."""
    if sys.stdout is None:
        return
    try:
        with writing("standard output"):
            sys.stdout.flush()
    except OutputError:
        _lead_nowhere(sys.stdout)
        raise


def flush_messages() -> None:
    """Flush standard error, if possible."""
    with losing_messages():
        sys.stderr.flush()


def _lead_nowhere(stream: TextIO) -> None:
    """Discard a stream's buffer and everything written to it from now on."""
    with suppress(OSError):  # in an embedding program a stream may have no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
