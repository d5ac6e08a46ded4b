"""Start cores as forks of a process that has imported what they need: they start in milliseconds."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from jaxllm.engine.core.fork_server import PID_BYTES, SIZE_BYTES
from jaxllm.utils.child_process import python_command

_PATIENCE_SECONDS = 60.0
"""The longest wait for a fork: the process may still be at its imports."""
_POLL_SECONDS = 0.01
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class ForkedProcess:
    """A child of this process that a fork server has made. Any thread may use it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        with self._lock:
            if self._status is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # SIGCHLD is ignored here: its status is lost, as in subprocess
                    pid, status = self.pid, 0
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

    def wait(self, timeout: float) -> int:
        """Wait until it has ended and return what `poll` does. Raises subprocess.TimeoutExpired after `timeout`."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def kill(self) -> None:
        """Kill it, and do not wait."""
        with self._lock:
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A process that forks cores. It ends with this one. Any thread may use this.

    The forks are children of this process, and go on without the server. They need Linux: elsewhere `fork` makes none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Return the id of the process, None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def begin(self) -> None:
        """Start the process unless it runs, and do not wait for its imports."""
        with self._lock:
            is_running = self._process is not None and self._process.poll() is None
            if is_running or self._is_closed or not _adopt_orphans(False):
                return
            self._end()
            self._orders, theirs = socket.socketpair()
            self._orders.settimeout(_PATIENCE_SECONDS)
            with theirs:
                command = python_command("jaxllm.engine.core.fork_server")
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), process_group=0)

    def fork(self, order: bytes) -> ForkedProcess | None:
        """Fork a process that carries out an order, a `StartOrder`; None if the server has ended, or is not there."""
        with self._lock:
            if self._orders is None:
                return None
            pid = b""
            _adopt_orphans(True)
            try:
                self._orders.sendall(len(order).to_bytes(SIZE_BYTES) + order)
                pid = self._orders.recv(PID_BYTES, socket.MSG_WAITALL)
            except OSError:  # it has ended, or does not answer
                pass
            finally:
                _adopt_orphans(False)
            if len(pid) == PID_BYTES:
                return ForkedProcess(int.from_bytes(pid))
            self._end()
            return None

    def close(self) -> None:
        """End the process, and start no other. A `fork` that waits in another thread then makes none."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None and self._orders is not None:
            self._process.kill()
            self._process.wait()
            self._orders.close()
        self._process = self._orders = None


def _adopt_orphans(does: bool) -> bool:
    """Let this process become the parent of descendants whose parents end from now on, or no longer; return whether the
    system can do so.
    """
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(does), 0, 0, 0) == 0
