"""One of several front-end processes, as its parent sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from jaxllm.config.environment import core_timeouts
from jaxllm.core_messages import EngineCoreRequest, sequence_ids
from jaxllm.engine.client.core_watch import CoreWatch
from jaxllm.engine.transport.sockets import Addresses, Meeting, SocketInbox, SocketOutbox
from jaxllm.engine.transport.wire import FrameError, FromCore, Heartbeat, ToCore
from jaxllm.utils.child_process import input_of, python_command

logger = logging.getLogger(__name__)

_MODULE = "jaxllm.server.front_end"
_ALIVE = Heartbeat(step_seconds=0.0, is_compiling=False, is_warm=True)


class Settings(msgspec.Struct, frozen=True):
    """The settings of all front ends of a server."""

    engine_args: dict[str, Any]
    """The arguments of AsyncEngineArgs that are not their defaults, in JSON's types."""
    server_args: dict[str, Any]
    """The arguments of ServerArgs."""


class FrontOrder(msgspec.Struct, frozen=True):
    """What the parent writes to the standard input of a front end's process."""

    index: int
    """Its number, and its row on the board."""
    settings: Settings
    addresses: Addresses
    folder: str
    """The folder of the addresses."""
    listener_fd: int
    grpc_fd: int | None
    """That of a socket with gRPC's address; None for a front end that does not serve gRPC."""
    board_fd: int
    num_rows: int
    is_again: bool
    """True if a front end of the engine has served before."""
    parent_pid: int
    log_level: int
    sys_path: list[str]


class FrontProcess:
    """A process, the sockets to it, and what it has asked of the core. For one thread."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        listener_fd: int,
        board_fd: int,
        num_rows: int,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        grpc_fd: int | None = None,
        is_again: bool,
    ) -> None:
        """Start the process, which serves gRPC too if it gets `grpc_fd`. `is_again` if a front end of the engine has
        served before.

        Raises OSError if the system starts no process.
        """
        self.index = index
        self._meeting = Meeting.on_host()
        self._watch = CoreWatch(*core_timeouts())
        self.is_serving = False
        """True once it has reported: it is ready."""
        self.sequences: set[str] = set()
        """The sequences that it has sent and that have not ended."""
        self.kept: set[str] = set()
        """Its requests whose blocks may be kept for forks."""
        self.report: Any = []
        """Its last report of its metrics, a `Report` in plain values."""
        order = FrontOrder(
            index=index,
            settings=settings,
            addresses=self._meeting.addresses,
            folder=str(self._meeting.folder),
            listener_fd=listener_fd,
            grpc_fd=grpc_fd,
            board_fd=board_fd,
            num_rows=num_rows,
            is_again=is_again,
            parent_pid=os.getpid(),
            log_level=logging.getLogger("jaxllm").getEffectiveLevel(),
            sys_path=[each for each in sys.path if isinstance(each, str) and each.isprintable()],
        )
        try:
            self._process = _started(order)
        except BaseException:
            self._meeting.close()
            raise
        self.inbox = SocketInbox(context, self._meeting.addresses)
        self._outbox = SocketOutbox(context, self._meeting.addresses, can_wait=False)
        self.pidfd = -1
        with contextlib.suppress(OSError):  # not every system has such descriptors; then its status is polled
            self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def hear(self) -> Sequence[ToCore | FrameError]:
        """Return the messages that have come from it."""
        messages = self.inbox.receive(wait=False)
        if messages:
            self._meeting.close()  # it has bound its sockets, and both are connected
        if messages and self.is_serving:
            self._watch.hear(_ALIVE)
        return messages

    def take_report(self, report: Any) -> None:
        """Take in a report. It serves, and sends two a second from now on: silence means that it hangs."""
        self.report, self.is_serving = report, True
        self._watch.hear(_ALIVE)

    def complaint(self) -> str | None:
        """Return why it must be killed: it has been silent for too long; None if nothing is wrong."""
        return self._watch.complaint()

    def send(self, message: FromCore) -> None:
        """Send it a message. Raises FrameError if it is too large."""
        self._outbox.send(message)

    def add(self, request: EngineCoreRequest) -> list[str]:
        """Note a request of its, and return the sequences."""
        ids = sequence_ids(request)
        self.sequences.update(ids)
        if request.keeps_blocks:
            self.kept.add(request.request_id)
        return ids

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self.status is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill the process if it still runs, and release files and descriptors."""
        if self.status is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self.inbox.close()
        self._outbox.abandon()
        self._meeting.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _started(order: FrontOrder) -> subprocess.Popen[bytes]:
    """Start a process with an order. Raises OSError if the system does not."""
    fds = [fd for fd in (order.listener_fd, order.board_fd, order.grpc_fd) if fd is not None]
    with input_of(msgspec.json.encode(order)) as stdin:
        return subprocess.Popen(
            python_command(_MODULE),
            stdin=stdin,
            pass_fds=fds,
            process_group=0,  # Ctrl-C in a terminal comes to the parent alone
        )
