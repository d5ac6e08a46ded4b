"""Another process of this program is asked: one request goes in, one result or the user's mistake comes out.

This is for work that wants an environment of its own, or a process that has just started. Both speak JSON: the request
is the child's standard input, the answer the last line of its standard output. What it logs goes to standard error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.fork_safety import end_with


class ChildError(RuntimeError):
    """The process ended without an answer; it has said why on standard error."""


class _Question(msgspec.Struct):
    """The request to a process, and the id of the one that asks."""

    asker: int
    request: msgspec.Raw


class _Answer(msgspec.Struct):
    """The answer of a process: a result, or what the user did wrong."""

    result: Any = None
    error: str | None = None
    parameter: str | None = None


def python_command(module: str) -> list[str]:
    """Return the command that runs a module with this process's flags of Python; it imports no files of the folder that
    the process is in.
    """
    # Private, but there since Python 3.2: multiprocessing starts its children so too.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", module]


def ask[T](module: str, request: Any, kind: type[T], env: Mapping[str, str]) -> T:
    """Run `module` in a new process with the environment given and return its result, of the type `kind`.

    Raises VLLMValidationError as the process did, ChildError if it ended without an answer. When this process is
    interrupted, or ends, so does the other.
    """
    with subprocess.Popen(
        python_command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(env),
        process_group=0,  # Ctrl-C in a terminal comes here alone; who asked decides
    ) as process:
        try:
            question = _Question(os.getpid(), msgspec.Raw(msgspec.json.encode(request)))
            output, _ = process.communicate(msgspec.json.encode(question))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or not output.strip():
        raise ChildError(f"{module} ended with status {process.returncode}; the reason is above")
    answer = msgspec.json.decode(output.splitlines()[-1], type=_Answer)
    if answer.error is not None:
        raise VLLMValidationError(answer.error, parameter=answer.parameter)
    return msgspec.convert(answer.result, kind)


def reply[T](kind: type[T], work: Callable[[T], Any]) -> int:
    """Be the process asked: do the work for one request, which is of the type `kind`; returns the exit status.

    What `work` raises besides VLLMValidationError ends the process with a traceback, for the user to see.
    """
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
    end_with(question.asker)
    request = msgspec.json.decode(question.request, type=kind)
    try:
        answer = _Answer(result=work(request))
    except VLLMValidationError as error:
        answer = _Answer(error=str(error), parameter=error.parameter)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    return 0
