"""A talk between a model and a person at a terminal, or the lines of a pipe; answers are shown as they arrive."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from jaxllm.cli.client.openai_client import RequestError
from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.streams import losing_messages, say, show, writing

MARK = "> "
"""The prompt at a terminal."""

type Write = Callable[[str], None]


class _Talker(Protocol):
    """The answering side of a talk."""

    def answer(self, message: str, write: Write) -> int:
        """Write the answer to a message piece by piece, and return its number of tokens, 0 if unknown.

        Raises RequestError, VLLMValidationError, and KeyboardInterrupt once it is stopped.
        """
        ...


def _is_message(_line: str) -> None:
    """Return None: there are no orders."""


def talk(
    talker: _Talker, quick: str | None, *, shows_stats: bool = False, obey: Callable[[str], str | None] = _is_message
) -> int:
    """Let a talker answer the message `quick`, or each line of standard input; return the exit status.

    At a terminal, errors and Ctrl-C end an answer; elsewhere they end the talk. At a terminal, `obey` does what a line
    orders, and returns a sentence about it, or None for a line that is a message.
    """
    if sys.stdout is None:
        raise VLLMValidationError("standard output is closed: there is nowhere to answer.", parameter="stdout")
    if quick is None and sys.stdin is not None and sys.stdin.isatty():
        _converse(talker, shows_stats, obey)
        return 0
    try:
        for message in _lines() if quick is None else (quick,):
            _answer(talker, message, shows_stats)
    except RequestError as error:
        say(f"jaxllm: error: {error}")
        return 1
    return 0


def _converse(talker: _Talker, shows_stats: bool, obey: Callable[[str], str | None]) -> None:
    """Answer the lines that a person types, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # lets input() edit lines and keep their history
    say("Ctrl-C stops an answer, Ctrl-D ends.")
    while True:
        try:
            message = _ask()
        except EOFError:
            return
        except KeyboardInterrupt:  # ends the line
            say("")
            continue
        with contextlib.suppress(KeyboardInterrupt):
            try:
                if (done := obey(message)) is not None:
                    say(done)
                elif message.strip():
                    _answer(talker, message, shows_stats)
            except (RequestError, VLLMValidationError) as error:
                say(f"jaxllm: error: {error}")


def _ask() -> str:
    """Return the next line from the terminal. Raises EOFError."""
    if sys.stdout.isatty():
        line = input(MARK)
    else:  # when answers go to a file, the prompt does not
        with losing_messages():
            print(MARK, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
    return line.rstrip("\n").encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _lines() -> Iterator[str]:
    """Yield the non-blank lines of standard input."""
    lines: Iterable[bytes] = () if sys.stdin is None else sys.stdin.buffer
    for line in lines:
        try:
            message = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            message = f"standard input is not text in UTF-8: {error}."
            raise VLLMValidationError(message, parameter="stdin") from error
        if message.strip():
            yield message


def _answer(talker: _Talker, message: str, shows_stats: bool) -> None:
    """Show the answer to a message, and a newline after it."""
    started = time.monotonic()
    first: float | None = None

    def write(text: str) -> None:
        nonlocal first
        first = first or time.monotonic()
        with writing("standard output"):
            print(text, end="", flush=True)

    try:
        num_tokens = talker.answer(message, write)
    except (KeyboardInterrupt, RequestError, VLLMValidationError) as end:
        if first is not None or isinstance(end, KeyboardInterrupt):
            show("")
        raise
    show("")
    if shows_stats and first is not None:
        seconds = time.monotonic() - started
        ttft = (first - started) * 1000
        say(f"TTFT {ttft:.0f} ms, {num_tokens / seconds:.1f} tokens/s ({num_tokens} tokens in {seconds:.2f} s)")
