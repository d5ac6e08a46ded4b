"""The connection between the first host of a model and another one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue

import msgspec

from jaxllm.engine.core.hosts.wire import Message, decode, encode

_SEND_SECONDS = 3
"""A host that takes no part of a message for this long is lost."""
_POLL_SECONDS = 0.1
_MAX_GREETING_BYTES = 1024


class Link:
    """Messages to and from one host, in order. Any thread may send; one receives."""

    def __init__(self, connection: Connection, rank: int, address: str) -> None:
        """Use a connection to the host `rank`; its address only appears in messages."""
        self._connection, self.rank, self.address = connection, rank, address
        self._lock = threading.Lock()
        with socket.socket(fileno=connection.fileno()) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
            raw.detach()

    def __str__(self) -> str:
        return f"host {self.rank} ({self.address})"

    def fileno(self) -> int:
        """Return the descriptor that can be read when a message is there, or the host is gone."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the host is gone, or takes nothing for `_SEND_SECONDS`."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that is encoded already."""
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> Message:
        """Wait for a message and return it. Raises EOFError or OSError if the host is gone, msgspec.MsgspecError for
        what is no message of this version.
        """
        return decode(self._connection.recv_bytes())


def accept(server: socket.socket, key: bytes, count: int, seconds: float) -> list[Link]:
    """Wait for `count` hosts that know the key, and return the links to them by rank. Raises TimeoutError.

    Connections from others are ignored, and do not delay the hosts.
    """
    deadline, links = time.monotonic() + seconds, list[Link]()
    greeted: SimpleQueue[Link] = SimpleQueue()
    server.settimeout(_POLL_SECONDS)
    while len(links) < count:
        with contextlib.suppress(TimeoutError):
            raw, _ = server.accept()
            threading.Thread(target=_greet, args=(raw, key, greeted), daemon=True).start()
        with contextlib.suppress(Empty):
            while True:
                links.append(greeted.get_nowait())
        if time.monotonic() > deadline:
            raise TimeoutError(f"of {count} other hosts, {count - len(links)} have not come within {seconds:.0f} s")
    return sorted(links, key=lambda link: link.rank)


def connect(address: str, port: int, key: bytes, rank: int) -> Link:
    """Return the link to the first host, for the host `rank`; `key` is the first one's secret."""
    connection = Client((address, port), authkey=key)
    connection.send_bytes(msgspec.json.encode((rank, socket.gethostname())))
    assert isinstance(connection, Connection)
    return Link(connection, 0, address)


def _greet(raw: socket.socket, key: bytes, greeted: SimpleQueue[Link]) -> None:
    """Let a host show that it knows the key, as `Client` does, and say its rank."""
    raw.setblocking(True)
    connection = Connection(raw.detach())
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        rank, name = msgspec.json.decode(connection.recv_bytes(_MAX_GREETING_BYTES), type=tuple[int, str])
    except Exception:  # noqa: BLE001 (a stranger may send anything)
        connection.close()
    else:
        greeted.put(Link(connection, rank, name))
