"""The process that compiles, so that the one that asked needs no compiler, no environment and no device of its own.

It reads a `Request` as JSON from standard input and writes an `Answer` as the last line of standard output.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.log import show_log

from .process import Answer, Request


def main() -> int:
    """Answer one request; a program that does not compile is raised, for the asking process to show."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked decides, and ends this process
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    show_log()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)

    from jaxllm.config import EngineArgs

    from .examine import examine

    try:
        answer = Answer(report=examine(EngineArgs(**request.engine_args), request.topology))
    except VLLMValidationError as error:
        answer = Answer(error=str(error), parameter=error.parameter)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    return 0


def _end_with(asker: int) -> None:
    """End this process, however busy, when the one that asked is gone."""
    while os.getppid() == asker:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
