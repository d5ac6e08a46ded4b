"""Run one request in a child process of this program and return its result, or raise the user's mistake.

For work that needs another environment or a fresh process. Both sides use JSON: the request is the child's standard
input, the answer the last line of its standard output. Its log goes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.fork_safety import end_with

END_SECONDS = 30.0
"""The longest time that a killed process may take to end: to leave its device."""


class ChildError(RuntimeError):
    """The process ended without an answer; its standard error has the reason."""


class _Question(msgspec.Struct):
    """The request, and the id of the parent process."""

    asker: int
    request: msgspec.Raw


class _Answer(msgspec.Struct):
    """The answer: a result, or the user's mistake."""

    result: Any = None
    error: str | None = None
    parameter: str | None = None


def python_command(module: str) -> list[str]:
    """Return the command that runs a module with this process's Python flags, without importing files from the current
    folder.
    """
    # Private, but there since Python 3.2: multiprocessing starts its children so too.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", module]


@contextlib.contextmanager
def input_of(content: bytes) -> Iterator[IO[bytes]]:
    """Yield a file that is a child's standard input: nobody waits until the child reads it, as with a full pipe."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


@contextlib.contextmanager
def started(module: str, request: Any, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `module` in a new process with the environment `env`; its `receive` returns the request.

    The child is killed at the end of the block, and ends with this process.
    """
    with subprocess.Popen(
        python_command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(env),
        process_group=0,  # Ctrl-C in a terminal comes here alone; who asked decides
    ) as process:
        try:
            assert process.stdin is not None
            question = _Question(os.getpid(), msgspec.Raw(msgspec.json.encode(request)))
            with contextlib.suppress(BrokenPipeError), process.stdin:  # its exit status tells more
                process.stdin.write(msgspec.json.encode(question))
            yield process
        finally:
            process.kill()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:  # a driver holds it; Popen would wait for ever
                process.returncode = -signal.SIGKILL


def receive[T](kind: type[T]) -> T:
    """Return the request, of type `kind`, in the child process, which ends with its parent from now on."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
    end_with(question.asker)
    return msgspec.json.decode(question.request, type=kind)


def ask[T](module: str, request: Any, kind: type[T], env: Mapping[str, str]) -> T:
    """Run `module` in a new process with the environment `env` and return its result, of type `kind`.

    Raises VLLMValidationError if the process did, ChildError if it ended without an answer. The child ends when this
    process is interrupted or ends.
    """
    with started(module, request, env) as process:
        assert process.stdout is not None
        lines, status = process.stdout.read().splitlines(), process.wait()
    if status != 0 or not lines:
        raise ChildError(f"{module} ended with status {status}; the reason is above")
    answer = msgspec.json.decode(lines[-1], type=_Answer)
    if answer.error is not None:
        raise VLLMValidationError(answer.error, parameter=answer.parameter)
    return msgspec.convert(answer.result, kind)


def reply[T](kind: type[T], work: Callable[[T], Any]) -> int:
    """Serve one request, of type `kind`, in the child process; return the exit status.

    Any exception of `work` but VLLMValidationError ends the process with a traceback.
    """
    request = receive(kind)
    try:
        answer = _Answer(result=work(request))
    except VLLMValidationError as error:
        answer = _Answer(error=str(error), parameter=error.parameter)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    return 0
