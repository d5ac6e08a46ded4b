"""A link is the connection between the first host of a model and another one."""

from __future__ import annotations

import contextlib
import socket
import threading
from multiprocessing.connection import Client, Connection, Listener

import msgspec

from jaxllm.engine.hosts.wire import Message, decode, encode


class Link:
    """Messages to and from one host, in order. Any thread may send; one receives."""

    def __init__(self, connection: Connection, rank: int, address: str) -> None:
        """Take a connection to the host `rank`, whose address is for messages alone."""
        self._connection, self.rank, self.address = connection, rank, address
        self._lock = threading.Lock()
        with socket.socket(fileno=connection.fileno()) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.detach()

    def __str__(self) -> str:
        return f"host {self.rank} ({self.address})"

    def fileno(self) -> int:
        """Return the descriptor that can be read when a message is there, or the host is gone."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the host is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that is encoded already."""
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> Message:
        """Wait for a message and return it. Raises EOFError or OSError if the host is gone."""
        return decode(self._connection.recv_bytes())

    def close(self) -> None:
        """Close the connection, which the other side sees."""
        with contextlib.suppress(OSError):
            self._connection.close()


def accept(listener: Listener, count: int) -> list[Link]:
    """Wait for so many hosts, and return the links to them by rank, which each sends first."""
    links = []
    while len(links) < count:
        connection = listener.accept()
        rank, address = msgspec.json.decode(connection.recv_bytes(), type=tuple[int, str])
        assert isinstance(connection, Connection)
        links.append(Link(connection, rank, address))
    return sorted(links, key=lambda link: link.rank)


def connect(address: str, port: int, key: bytes, rank: int) -> Link:
    """Return the link to the first host, for the host `rank`; `key` is the first one's secret."""
    connection = Client((address, port), authkey=key)
    connection.send_bytes(msgspec.json.encode((rank, socket.gethostname())))
    assert isinstance(connection, Connection)
    return Link(connection, 0, address)
