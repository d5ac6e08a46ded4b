"""An engine core gets a process, or a thread, of its own to run in, which is watched from the front end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from jaxllm.config.engine_args import EngineArgs
from jaxllm.engine.core_process import Order, StartCore, run_core
from jaxllm.engine.sockets import Meeting


class CoreHost(Protocol):
    """The process or thread in which a core runs."""

    meeting: Meeting
    name: str
    """How messages call it."""

    @property
    def fds(self) -> list[int]:
        """Return file descriptors that become readable when it ends."""
        ...

    def end_reason(self) -> str | None:
        """Say how it has ended; None while it runs."""
        ...

    @property
    def poll_seconds(self) -> float:
        """Return how long to wait at most before asking again whether it has ended."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it has ended; it is killed after so many seconds, where that can be done."""
        ...

    def stop(self, seconds: float) -> None:
        """Do as `wait` does, and release what this has of the system. May be called twice."""
        ...

    def kill(self) -> None:
        """End it at once, where that can be done."""
        ...


class CoreProcess:
    """A core in a process of its own."""

    poll_seconds = 0.5  # a descriptor tells of its end

    def __init__(self, engine_args: EngineArgs, command: Sequence[str] = ()) -> None:
        """Start the process: `command`, which ends in `core_process.serve` as the module `core_process` does.

        Raises VLLMValidationError for arguments that cannot cross to it.
        """
        portable = engine_args.portable()
        self.meeting = Meeting.on_host()
        order = Order(portable, self.meeting.addresses, sys.path, logging.getLogger("jaxllm").getEffectiveLevel())
        self._process = subprocess.Popen(
            command or [sys.executable, "-P", "-m", "jaxllm.engine.core_process"],
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal comes to the front end alone, which decides
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self.name = f"the engine core (process {self._process.pid})"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # its end will be seen
            stdin.write(msgspec.json.encode(order))

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    @property
    def fds(self) -> list[int]:
        """Return a file descriptor that becomes readable when the process ends."""
        return [self._pidfd]

    def end_reason(self) -> str | None:
        """Say how the process has ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status >= 0:
            return f"it ended with status {status}"
        name = signal.Signals(-status).name
        hint = "; the system kills processes so when memory runs out" if name == "SIGKILL" else ""
        return f"it was ended by {name}{hint}"

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended; it is killed after so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def stop(self, seconds: float) -> None:
        """Do as `wait` does, and close what there is to close. May be called twice."""
        self.wait(seconds)
        self.meeting.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()


class CoreThread:
    """A core in a thread of this process, as `disable_frontend_multiprocessing` asks for."""

    fds: list[int] = []  # noqa: RUF012 - there are none
    poll_seconds = 0.02

    def __init__(self, start: StartCore, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Start the thread; its sockets may connect before the front end's are bound."""
        self.meeting = Meeting.in_process()
        self.name = "the engine core (a thread)"
        self._thread = threading.Thread(
            target=run_core, args=(start, self.meeting.addresses, context), name="jaxllm-core", daemon=True
        )
        self._thread.start()

    def end_reason(self) -> str | None:
        """Say that the thread has ended; None while it runs."""
        return None if self._thread.is_alive() else "its thread ended"

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended, or for so many seconds: a thread cannot be killed."""
        self._thread.join(seconds)

    def stop(self, seconds: float) -> None:
        """Do as `wait` does. May be called twice."""
        self.wait(seconds)

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""
