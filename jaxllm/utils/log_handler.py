"""A log handler for stderr that never blocks on a slow reader."""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime

FORMAT = "%(asctime)s %(levelname)s %(message)s"
_MOST_BYTES = 1 << 20
"""The most bytes of log that wait for the reader; further lines are dropped and counted."""
_EXIT_SECONDS = 1.0
"""How long the process waits for the reader when it exits."""


class _LineFormatter(logging.Formatter):
    """Format a record as one line: local time to the millisecond, level, message."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__(FORMAT)
        self._second, self._shown_second = 0, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 (logging's name)
        """Return the time of a record. Many lines share their second, and to write it takes 10 us."""
        del datefmt
        second = int(record.created)
        if second != self._second:
            self._second, self._shown_second = second, time.strftime(self.default_time_format, time.localtime(second))
        return self.default_msec_format % (self._shown_second, record.msecs)  # pyright: ignore[reportOptionalOperand]


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON; for use in a `log_config_file`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class StderrHandler(logging.StreamHandler):
    """A handler that writes to stderr, through a thread if stderr is a pipe or a socket.

    A pipe that nobody reads is full after 64 KiB and then blocks its writer: an event loop or an engine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_LineFormatter())
        self._backlog: _Backlog | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or queue it for the thread."""
        backlog = self._find_backlog()
        if backlog is None:
            super().emit(record)
            return
        if backlog.is_full:
            backlog.num_dropped += 1
            return
        try:
            if count := backlog.take_dropped():
                message = f"{count} lines of the log were dropped before this one: nobody read them in time"
                told = logging.LogRecord("jaxllm", logging.WARNING, __file__, 0, message, None, None)
                backlog.put(self.format(told) + self.terminator)
            backlog.put(self.format(record) + self.terminator)
        except Exception:  # noqa: BLE001 - as other handlers do with a record that cannot be formatted
            self.handleError(record)

    def flush(self) -> None:
        """Wait briefly until the queued lines are written."""
        super().flush()
        if self._backlog is not None:
            self._backlog.flush()

    def _find_backlog(self) -> _Backlog | None:
        """Return the backlog if stderr needs one, else None."""
        descriptor = self._pipe()
        if descriptor is None:
            return None
        if self._backlog is not None and self._backlog.is_here:
            return self._backlog
        try:
            self._backlog = _Backlog(descriptor)
        except RuntimeError:  # Python is exiting and starts no more threads
            return None
        return self._backlog

    def _pipe(self) -> int | None:
        """Return the descriptor of a stream that can block on its reader; None for files, terminals and notebooks."""
        if self.stream is None or self.stream is not sys.__stderr__:
            return None
        try:
            descriptor = self.stream.fileno()
            mode = os.fstat(descriptor).st_mode
        except (OSError, ValueError):  # it is closed
            return None
        return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


class _Backlog:
    """Lines waiting to be written to a descriptor, and the thread that writes them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self.num_dropped = 0
        """Number of lines dropped since `take_dropped` was last called."""
        atexit.register(self.flush)
        threading.Thread(target=self._run, name="jaxllm-log", daemon=True).start()

    @property
    def is_here(self) -> bool:
        """Return whether the thread runs in this process: a forked child has none."""
        return self._pid == os.getpid()

    @property
    def is_full(self) -> bool:
        """Return whether the next line must be dropped."""
        return self._num_bytes >= _MOST_BYTES

    def take_dropped(self) -> int:
        """Return the number of dropped lines and reset it."""
        count, self.num_dropped = self.num_dropped, 0
        return count

    def put(self, line: str) -> None:
        """Queue a line."""
        data = line.encode("utf-8", "backslashreplace")
        with self._changed:
            self._lines.append(data)
            self._num_bytes += len(data)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, at most _EXIT_SECONDS."""
        if self.is_here:
            with self._changed:
                self._changed.wait_for(lambda: not self._lines, _EXIT_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                data = self._lines[0]
            self._write(data)
            with self._changed:
                self._lines.popleft()
                self._num_bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # the pipe was made non-blocking by someone else
                select.select([], [self._descriptor], [])
            except OSError:  # the reader is gone
                return
