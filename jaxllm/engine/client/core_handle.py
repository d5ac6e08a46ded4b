"""Start an engine core in a process or a thread, watch it, and end it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import zmq

from jaxllm.engine.client.fork_server import ForkServer
from jaxllm.engine.core.core_process import StartCore, StartOrder, run_core
from jaxllm.engine.transport.sockets import Meeting
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.child_process import input_of, python_command

KILLED_SECONDS = 5.0
"""The longest wait for a killed process to end; one that waits for a device's driver may stay longer."""


class CoreHandle(Protocol):
    """The process or thread in which a core runs."""

    meeting: Meeting
    name: str
    """Its name in messages."""

    @property
    def pid(self) -> int | None:
        """Return the id of its process, if it has one of its own on this machine."""
        ...

    @property
    def fds(self) -> list[int]:
        """Return file descriptors that become readable when it ends."""
        ...

    def end_reason(self) -> str | None:
        """Return how it has ended; None while it runs."""
        ...

    @property
    def poll_seconds(self) -> float:
        """Return the longest time to wait before asking again whether it has ended."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it has ended; it is killed after `seconds`, where that can be done."""
        ...

    def stop(self, seconds: float) -> None:
        """Do as `wait` does, and release files and descriptors. May be called twice."""
        ...

    def kill(self) -> None:
        """Begin to end it, where that can be done, and do not wait."""
        ...


class CoreProcess:
    """A core in a process of its own."""

    poll_seconds = 0.5  # a descriptor becomes readable at its end

    def __init__(
        self,
        engine_args: EngineArgs,
        usage_context: UsageContext,
        command: Sequence[str] = (),
        replica: int | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """Start the process: a fork of the server `forks`, or without one `command`, which ends in `core_process.serve`
        as the module `core_process` does.

        `replica` is its number among several that are replicas of one another.

        Raises VLLMValidationError for arguments that cannot cross to it.
        """
        portable = engine_args.portable()
        self.meeting = Meeting.on_host()
        self._pidfd = -1
        try:
            order = msgspec.json.encode(_order(portable, usage_context, self.meeting, replica or 0))
            forked = None if forks is None else forks.fork(order)
            self._process = forked or _started(command, order)
        except BaseException:
            self.meeting.close()
            raise
        of_replica = "" if replica is None else f" of replica {replica}"
        self.name = f"the engine core{of_replica} (process {self._process.pid})"
        try:
            with contextlib.suppress(OSError):  # not every system has such descriptors; then its status is polled
                self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self.kill()
            self.stop(KILLED_SECONDS)
            raise

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    @property
    def fds(self) -> list[int]:
        """Return a file descriptor that becomes readable when the process ends, where there is one."""
        return [self._pidfd] if self._pidfd >= 0 else []

    def end_reason(self) -> str | None:
        """Return how the process has ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status >= 0:
            return f"it ended with status {status}"
        name = _signal_name(-status)
        hint = "; the system kills processes so when memory runs out" if name == "SIGKILL" else ""
        return f"it was ended by {name}{hint}"

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended; it is killed after `seconds`.

        Then too it may go on for as long as a device's driver does not answer it.
        """
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_SECONDS)

    def stop(self, seconds: float) -> None:
        """Do as `wait` does, and close files and descriptors. May be called twice."""
        self.wait(seconds)
        self.meeting.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self) -> None:
        """Kill the process and do not wait: it may take long to end, and callers wait for outputs."""
        self._process.kill()


def _started(command: Sequence[str], order: bytes) -> subprocess.Popen[bytes]:
    with input_of(order) as stdin:
        return subprocess.Popen(
            command or python_command("jaxllm.engine.core.core_process"),
            stdin=stdin,
            process_group=0,  # Ctrl-C in a terminal comes to the front end alone, which decides
        )


def _order(engine_args: dict[str, Any], usage_context: UsageContext, meeting: Meeting, replica: int) -> StartOrder:
    return StartOrder(
        engine_args,
        usage_context,
        meeting.addresses,
        [each for each in sys.path if _is_text(each)],
        logging.getLogger("jaxllm").getEffectiveLevel(),
        os.getpid(),
        replica,
        None if meeting.folder is None else str(meeting.folder),
    )


def _is_text(entry: Any) -> bool:
    """Return whether an entry of sys.path can be sent: Python skips other objects, and a path may not be UTF-8."""
    if not isinstance(entry, str):
        return False
    try:
        entry.encode()
    except UnicodeEncodeError:
        return False
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


class CoreThread:
    """A core in a thread of this process, as `disable_frontend_multiprocessing` asks for."""

    pid = None
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
        """Return how the thread has ended; None while it runs."""
        return None if self._thread.is_alive() else "its thread ended"

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended, or for `seconds`: a thread cannot be killed."""
        self._thread.join(seconds)

    def stop(self, seconds: float) -> None:
        """Do as `wait` does. May be called twice."""
        self.wait(seconds)

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""
