"""Standard output and standard error are written to here: they may be closed, full, broken, or lack a character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

OUTPUT_STATUS = 4
"""The exit status of a command whose results could not be written."""


class OutputError(Exception):
    """Results could not be written; the message says where, why, and what to do."""


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
    """Go on where standard error cannot be written: from then on, what is written there is lost."""
    try:
        yield
    except OSError:
        _lead_nowhere(sys.stderr)


def prepare_streams() -> None:
    """Make the standard streams fit to be written to: a closed standard error leads nowhere, and any text can be shown.

    A closed standard output stays None, as Python makes it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Else the next file to be opened has this number, and what libraries write to the stream ends up in it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:  # print(file=None) would write to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def show(text: str) -> None:
    """Write lines of results to standard output, at once. Raises OutputError."""
    with writing("standard output"):
        print(text, flush=True)


def say(text: str) -> None:
    """Write a line for the user to standard error, where that can be done."""
    with losing_messages():
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one write, since the log has a thread of its own


def flush_output() -> None:
    """Write what standard output still holds. Raises OutputError; then Python, at its end, does not fail again."""
    if sys.stdout is None:
        return
    try:
        with writing("standard output"):
            sys.stdout.flush()
    except OutputError:
        _lead_nowhere(sys.stdout)
        raise


def flush_messages() -> None:
    """Write what standard error still holds, where that can be done."""
    with losing_messages():
        sys.stderr.flush()


def _lead_nowhere(stream: TextIO) -> None:
    """Let everything written to a stream be dropped, also what it holds."""
    with suppress(OSError):  # a stream of an embedding program may have no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
