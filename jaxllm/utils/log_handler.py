"""The handler of the log on stderr never waits for whoever reads it."""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import stat
import sys
import threading
from collections import deque
from datetime import UTC, datetime

FORMAT = "%(asctime)s %(levelname)s %(message)s"
MOST_BYTES = 1 << 20
"""How much of the log waits for its reader at most; what comes then is dropped, and counted."""
EXIT_SECONDS = 1.0
"""How long the end of the process waits for the reader."""


class LineFormatter(logging.Formatter):
    """This writes each record as one form of line: the local time to the millisecond, the level, the message."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__(FORMAT)


class JsonFormatter(logging.Formatter):
    """This writes each record as one line of JSON, for a `log_config_file` to name."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class StderrHandler(logging.StreamHandler):
    """A handler that writes to stderr, by a thread of its own where that is a pipe or a socket.

    A pipe that nobody reads is full after 64 KiB, and whoever writes to it then waits: an event loop, or an engine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self._backlog: Backlog | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or leave it to the thread."""
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
        """Wait a moment until what there is has been written."""
        super().flush()
        if self._backlog is not None:
            self._backlog.flush()

    def _find_backlog(self) -> Backlog | None:
        """Return where lines wait for a thread, if they must."""
        descriptor = self._pipe()
        if descriptor is None:
            return None
        if self._backlog is not None and self._backlog.is_here:
            return self._backlog
        try:
            self._backlog = Backlog(descriptor)
        except RuntimeError:  # Python exits, and starts no more threads
            return None
        return self._backlog

    def _pipe(self) -> int | None:
        """Return the descriptor of a stream whose reader may keep it waiting; None for files, terminals, notebooks."""
        if self.stream is None or self.stream is not sys.__stderr__:
            return None
        try:
            descriptor = self.stream.fileno()
            mode = os.fstat(descriptor).st_mode
        except (OSError, ValueError):  # it is closed
            return None
        return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


class Backlog:
    """The lines that wait to be written to a descriptor, and the thread that writes them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self.num_dropped = 0
        """How many lines were dropped since the last that was taken."""
        atexit.register(self.flush)
        threading.Thread(target=self._run, name="jaxllm-log", daemon=True).start()

    @property
    def is_here(self) -> bool:
        """Say whether the thread is in this process: a forked child has none."""
        return self._pid == os.getpid()

    @property
    def is_full(self) -> bool:
        """Say whether what comes now is to be dropped."""
        return self._num_bytes >= MOST_BYTES

    def take_dropped(self) -> int:
        """Return how many lines were dropped, and count anew."""
        count, self.num_dropped = self.num_dropped, 0
        return count

    def put(self, line: str) -> None:
        """Have a line written, after those before it."""
        data = line.encode("utf-8", "backslashreplace")
        with self._changed:
            self._lines.append(data)
            self._num_bytes += len(data)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, or for EXIT_SECONDS."""
        if self.is_here:
            with self._changed:
                self._changed.wait_for(lambda: not self._lines, EXIT_SECONDS)

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
            except BlockingIOError:  # somebody has made the pipe so
                select.select([], [self._descriptor], [])
            except OSError:  # nobody can read it any more
                return
