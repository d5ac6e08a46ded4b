"""Accept connections from a listener that several processes share, the process with the fewest first."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from jaxllm.server.processes.board import Board, Column

logger = logging.getLogger(__name__)

_YIELD_SECONDS = 0.002
"""The time that a process with more connections than another leaves it to take the next one."""
_NO_ROOM_SECONDS = 0.1
"""The pause after the system has refused a connection, for example because no descriptor is free."""


class Acceptor:
    """Takes connections one by one. All processes wait at one queue, so that none of those in it is lost when a process
    dies, and a process that is busy, or has more connections than another, leaves new ones to others.
    """

    def __init__(self, listener: socket.socket, board: Board, row: int, count: Callable[[], int]) -> None:
        """`count` returns the number of connections of this process, which is shown in its row of the board."""
        self._listener, self._board, self._row, self._count = listener, board, row, count
        self._make: Callable[[], asyncio.Protocol]
        self._ssl: ssl.SSLContext | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._is_open = False
        self._opening: set[asyncio.Task[None]] = set()

    def begin(self, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None, backlog: int) -> None:
        """Take connections, and give each a new protocol."""
        self._make, self._ssl, self._is_open = make, context, True
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self.show()
        self._board.put(self._row, Column.IS_ACCEPTING, 1)
        self._listen()

    def end(self) -> None:
        """Take no more connections."""
        self._is_open = False
        self._board.put(self._row, Column.IS_ACCEPTING, 0)
        if self._handle is not None:
            self._handle.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)

    def show(self) -> int:
        """Show the number of connections on the board, and return it."""
        number = self._count() + len(self._opening)
        self._board.put(self._row, Column.CONNECTIONS, number)
        return number

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._on_readable)

    def _on_readable(self) -> None:
        if self.show() > self._board.least_connections():
            self._pause(_YIELD_SECONDS, self._accept_late)
        else:
            self._accept()

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._handle = loop.call_later(seconds, then)

    def _accept_late(self) -> None:
        if self._is_open and self._accept():
            self._listen()

    def _accept(self) -> bool:
        """Take one connection, if there is one; return False if the next one has to wait."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another process was faster
            return True
        except OSError as error:
            logger.error("a connection cannot be accepted: %s", error)
            self._pause(_NO_ROOM_SECONDS, self._accept_late)
            return False
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opened)
        self.show()
        return True

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        self.show()

    async def _open(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, connection, ssl=self._ssl)
        except (OSError, asyncio.CancelledError):  # a handshake that fails is the client's affair
            connection.close()
